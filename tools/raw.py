"""The raw transport: the time to send the bytes of a switch between the same pairs, without a plan or a certificate."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from ds_dynatrain.adapters.groups.process_groups import make_group
from ds_dynatrain.adapters.groups.worlds import launch_store
from ds_dynatrain.transfer import GroupTransport, Neighbors, RoutedTransport, Transport, allocate, prefault

Peers = dict[int, tuple[int, int]]
"""Bytes (to send, to receive) by member."""
SECONDS = 120.0


class RawTransport:
    """The raw transport between all processes of a launch. Make it on each of them before `ds_dynatrain.initialize`.

    kind: as `dynatrain.transport`.
    """

    def __init__(self, member: int, size: int, kind: str) -> None:
        self.member = member
        self._group, self._store = make_group(launch_store(), f"bench_raw_{kind}", member, size, SECONDS)
        far = GroupTransport(self._group, range(size))
        self._way: Transport = far if kind == "gloo" else RoutedTransport(_neighbors(member, size, kind), far)

    def seconds(self, peers: Peers, members: tuple[int, ...], repeats: int) -> list[float]:
        """Return this member's time in each of `repeats` exchanges, after one that does not count. All members call
        this.

        Each direction of each pair has one contiguous buffer, which was allocated and used before.
        """
        sends = [(peer, _touched(sent)) for peer, (sent, _) in peers.items() if sent]
        receives = [(peer, _touched(received)) for peer, (_, received) in peers.items() if received]
        times = [self._once(sends, receives, members) for _ in range(repeats + 1)]
        return times[1:]

    def _once(self, sends: list[Any], receives: list[Any], members: tuple[int, ...]) -> float:
        self.meet(members)
        begin = time.perf_counter()
        handles = [self._way.receive(buffer, peer, 7) for peer, buffer in receives]
        handles += [self._way.send(buffer, peer, 7) for peer, buffer in sends]
        for handle in handles:
            handle.wait(time.monotonic() + SECONDS)
        return time.perf_counter() - begin

    def meet(self, members: tuple[int, ...]) -> None:
        """Wait for all `members`: each sends a byte to the first one and gets one back."""
        token, first = torch.zeros(1, dtype=torch.uint8), members[0]
        others = members[1:] if self.member == first else (first,)
        for call in ("recv", "send") if self.member == first else ("send", "recv"):
            for other in others:
                getattr(self._group, call)([token], other, 8).wait()


def _neighbors(member: int, size: int, kind: str) -> Neighbors:
    store = PrefixStore(f"bench_near_{kind}", launch_store())

    def share(what: str, record: Any) -> dict[int, Any]:
        store.set(f"{what}/{member}", json.dumps(record))
        return {other: json.loads(store.get(f"{what}/{other}")) for other in range(size)}

    return Neighbors.meet(member, share, SECONDS)


def _touched(nbytes: int) -> torch.Tensor:
    tensor = allocate(nbytes, torch.uint8)
    prefault(tensor)
    return tensor
