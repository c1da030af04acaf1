"""One rank of the gloo tests: runs every case in order and writes what it saw as JSON. Started by test_transport.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import _dist2

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import GroupTransport, execute, transport
from tests.transfer.states import buffers_of, differences, logical_state, space

MEMBERS = (10, 11, 12)
"""Member ids differ from ranks, as in a world that has changed."""


def make_group(store: Store, name: str, rank: int) -> dist.ProcessGroup:
    prefixed = PrefixStore(name, store)
    return _dist2._gloo_factory(prefixed, rank, len(MEMBERS), timedelta(seconds=30), torch.device("cpu"))


def every_dtype(rank: int, group: dist.ProcessGroup) -> list[str]:
    ends, wrong = GroupTransport(group, MEMBERS), []
    ahead, behind = MEMBERS[(rank + 1) % 3], MEMBERS[(rank - 1) % 3]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64):
        for numel in (0, 1, 1000):
            values, got = torch.full((numel,), 1 + (rank - 1) % 3).to(dtype), torch.zeros(numel, dtype=dtype)
            handles = [ends.receive(got, behind, 5), ends.send(torch.full((numel,), 1 + rank).to(dtype), ahead, 5)]
            for handle in handles:
                handle.wait(time.monotonic() + 20)
            if not torch.equal(values, got):
                wrong.append(f"{dtype} {numel}")
    return wrong


def split_messages(rank: int, group: dist.ProcessGroup) -> list[str]:
    transport.MESSAGE_BYTES = 1000
    wrong = every_dtype(rank, group)
    transport.MESSAGE_BYTES = 1 << 30
    return wrong


def switches(rank: int, group: dist.ProcessGroup) -> list[str]:
    wrong = []
    for stage, members, next_stage, next_members in (
        (1, (10, 11), 1, (10, 11, 12)),
        (3, (10, 11, 12), 2, (12, 11)),
        (0, (11,), 3, (10, 12)),
    ):
        layout = Layout(zero_stage=stage, data=len(members))
        target = Layout(zero_stage=next_stage, data=len(next_members))
        me, vps = MEMBERS[rank], space(layout, members)
        state, plan = logical_state(vps), plan_switch(vps, target, next_members)
        source = buffers_of(vps, layout, members.index(me), state) if me in members else {}
        into = buffers_of(vps, target, next_members.index(me), None) if me in next_members else {}
        execute(plan.for_member(me), source, into, GroupTransport(group, MEMBERS), 30, 1 << 20)
        if me in next_members:
            wrong += differences(vps, target, next_members.index(me), state, into)
    return wrong


def refusals(rank: int, group: dist.ProcessGroup) -> list[str]:
    ends, got = GroupTransport(group, MEMBERS), []
    for call in (
        lambda: GroupTransport(group, (10, 11)),
        lambda: GroupTransport(group, (10, 11, 11)),
        lambda: ends.send(torch.zeros(3), MEMBERS[rank], 0),
        lambda: ends.receive(torch.zeros(3), 99, 0),
        lambda: ends.send(torch.zeros(3, 3), MEMBERS[(rank + 1) % 3], 0),
    ):
        try:
            call()
            got.append("no error")
        except TransferError as error:
            got.append(str(error))
    return got


def silent_member(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 2 does not answer; the others wait for it for half a second."""
    if rank == 2:
        time.sleep(1.5)
        return {}
    handle = GroupTransport(group, MEMBERS).receive(torch.zeros(10), MEMBERS[2], 1)
    return outcome(handle, 0.5)


def dying_member(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 2 is gone before it sends; runs last."""
    if rank == 2:
        os._exit(0)
    handle = GroupTransport(group, MEMBERS).receive(torch.zeros(10), MEMBERS[2], 1)
    return outcome(handle, 20.0)


def outcome(handle: transport.Handle, seconds: float) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        handle.wait(begin + seconds)
    except MemberMissing as error:
        return {"error": "MemberMissing", "members": error.members, "seconds": time.monotonic() - begin}
    except TransferError as error:
        return {"error": "TransferError", "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": None}


CASES: tuple[Callable[[int, dist.ProcessGroup], Any], ...] = (every_dtype, split_messages, switches, refusals)
LAST_CASES: tuple[Callable[[int, dist.ProcessGroup], Any], ...] = (silent_member, dying_member)
"""Each of these ends its group."""


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), len(MEMBERS))
    shared, seen = make_group(store, "shared", rank), {}
    groups = {case.__name__: make_group(store, case.__name__, rank) for case in LAST_CASES}
    for case in (*CASES, *LAST_CASES):
        seen[case.__name__] = case(rank, groups.get(case.__name__, shared))
        (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
