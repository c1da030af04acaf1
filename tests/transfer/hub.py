"""An in-memory transport with a rendezvous: a send ends only when its receive was started, as in gloo."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ds_dynatrain.errors import MemberMissing


@dataclass
class Call:
    """A send or a receive that waits for its other half."""

    tensor: torch.Tensor
    peer: int
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, deadline: float) -> None:
        if not self.done.wait(max(0.0, deadline - time.monotonic())):
            raise MemberMissing("call", [self.peer], 0.0)


def all_at_once(members: Iterable[int], part: Callable[[int], object]) -> None:
    """Every member's part in a thread of its own; AssertionError with what they have raised."""
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            part(number)
        except Exception as error:  # a thread has no other way
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class Hub:
    """What joins the transports of all members; counts the bytes that are under way without a place of their own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: dict[tuple[int, int, int], deque[Call]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[Call]] = defaultdict(deque)
        self.sizes: list[int] = []

    def transport(self, member: int) -> HubTransport:
        return HubTransport(self, member)

    def match(self, key: tuple[int, int, int]) -> None:
        while self.sends[key] and self.receives[key]:
            send, receive = self.sends[key].popleft(), self.receives[key].popleft()
            receive.tensor.copy_(send.tensor)
            self.sizes.append(send.tensor.numel())
            send.done.set()
            receive.done.set()


@dataclass(frozen=True)
class HubTransport:
    """One member's end."""

    hub: Hub
    me: int

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Call:
        return self._start(self.hub.sends, (self.me, member, tag), Call(tensor, member))

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Call:
        return self._start(self.hub.receives, (member, self.me, tag), Call(tensor, member))

    def _start(self, where: dict[tuple[int, int, int], deque[Call]], key: tuple[int, int, int], call: Call) -> Call:
        with self.hub.lock:
            where[key].append(call)
            self.hub.match(key)
        return call
