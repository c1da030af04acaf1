"""One rank of the transports' tests: every case over gloo and the memory of neighbors; notes what it saw.

Started by test_transport.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import GroupTransport, Neighbors, ReadyPlan, Transport, execute, transport
from ds_dynatrain.transfer import neighbors as reading
from tests.transfer.states import buffers_of, differences, logical_state, space

MEMBERS = (10, 11, 12)
"""Member ids differ from ranks, as in a world that has changed."""


def make_group(store: Store, name: str, rank: int) -> dist.ProcessGroup:
    prefixed, kind = PrefixStore(name, store), dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(prefixed, rank, len(MEMBERS))
    backend = dist.ProcessGroupGloo(prefixed, rank, len(MEMBERS), timeout=timedelta(seconds=30))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def every_dtype(rank: int, ends: Transport) -> list[str]:
    wrong = []
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


def split_messages(rank: int, ends: Transport) -> list[str]:
    transport.MESSAGE_BYTES = reading.MOST_BYTES = 1000
    wrong = every_dtype(rank, ends)
    transport.MESSAGE_BYTES = reading.MOST_BYTES = 1 << 30
    return wrong


def switches(rank: int, ends: Transport) -> list[str]:
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
        execute(ReadyPlan.of(plan.for_member(me), 1 << 20), source, into, ends, 30)
        if me in next_members:
            wrong += differences(vps, target, next_members.index(me), state, into)
    return wrong


def wrong_groups(group: dist.ProcessGroup) -> list[str]:
    return errors(lambda: GroupTransport(group, (10, 11)), lambda: GroupTransport(group, (10, 11, 11)))


def refusals(rank: int, ends: Transport) -> list[str]:
    return errors(
        lambda: ends.send(torch.zeros(3), MEMBERS[rank], 0),
        lambda: ends.receive(torch.zeros(3), 99, 0),
        lambda: ends.send(torch.zeros(3, 3), MEMBERS[(rank + 1) % 3], 0),
    )


def errors(*calls: Callable[[], object]) -> list[str]:
    got = []
    for call in calls:
        try:
            call()
            got.append("no error")
        except TransferError as error:
            got.append(str(error))
    return got


def out_of_step(rank: int, ends: Transport) -> list[str]:
    """Everybody waits for its sends before it waits for what comes, and one has messages of another tag first."""
    others = [member for member in MEMBERS if member != MEMBERS[rank]]
    said = [torch.full((5000,), 10.0 * MEMBERS[rank] + tag) for tag in (1, 2)]
    heard = {(member, tag): torch.zeros(5000) for member in others for tag in (1, 2)}
    incoming = [ends.receive(into, member, tag) for (member, tag), into in heard.items()]
    tags = (2, 1) if rank else (1, 2)
    for handle in [ends.send(said[tag - 1], member, tag) for member in others for tag in tags]:
        handle.wait(time.monotonic() + 20)
    for handle in reversed(incoming):
        handle.wait(time.monotonic() + 20)
    return [f"{member} {tag}" for (member, tag), into in heard.items() if not bool((into == 10.0 * member + tag).all())]


def unequal_lengths(rank: int, ends: Transport) -> str:
    """Rank 0 offers more than rank 1 awaits."""
    if rank == 2:
        return ""
    if rank == 0:
        return str(outcome(lambda: ends.send(torch.zeros(4), MEMBERS[1], 3), 0.5).get("text"))
    return str(outcome(lambda: ends.receive(torch.zeros(3), MEMBERS[0], 3), 20.0).get("text"))


def given_up(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 0 is told after a while that nothing will come."""
    end = time.monotonic() + 0.5

    def stop() -> None:
        if time.monotonic() > end:
            raise TransferError("nothing will come")

    ends = GroupTransport(group, MEMBERS, stop)
    return {} if rank else outcome(lambda: ends.receive(torch.zeros(3), MEMBERS[1], 1), 20.0)


def silent_member(rank: int, ends: Transport) -> dict[str, Any]:
    """Rank 2 does not answer; the others wait for it for half a second."""
    if rank == 2:
        time.sleep(1.5)
        return {}
    return outcome(lambda: ends.receive(torch.zeros(10), MEMBERS[2], 1), 0.5)


def outcome(start: Callable[[], transport.Handle], seconds: float) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        start().wait(begin + seconds)
    except MemberMissing as error:
        return {"error": "MemberMissing", "members": error.members, "seconds": time.monotonic() - begin}
    except TransferError as error:
        return {"error": "TransferError", "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": None}


CASES: tuple[Callable[[int, Transport], Any], ...] = (every_dtype, split_messages, switches, refusals, out_of_step)
LAST_CASES = ("silent_member", "dying_member")
"""After each of these a transport is of no use."""


def half_sent(rank: int, ends: Neighbors) -> dict[str, Any]:
    """Rank 2 is killed while rank 0 has read half of a message."""
    data = torch.full((8 << 20,), 7, dtype=torch.uint8)
    if rank == 2:
        ends.send(data, MEMBERS[0], 1).wait(time.monotonic() + 20)
    if rank != 0:
        return {}
    read = reading.read_memory

    def read_and_kill(process: int, address: int, into: torch.Tensor) -> None:
        half = into.numel() // 2
        read(process, address, into[:half])
        os.kill(process, signal.SIGKILL)
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        read(process, address + half, into[half:])

    reading.read_memory = read_and_kill
    return outcome(lambda: ends.receive(torch.zeros_like(data), MEMBERS[2], 1), 20.0)


def neighbors(store: Store, name: str, rank: int) -> Neighbors:
    """All three are on one machine."""
    prefixed = PrefixStore(name, store)

    def share(what: str, record: Any) -> dict[int, Any]:
        prefixed.set(f"{what}/{MEMBERS[rank]}", json.dumps(record))
        return {member: json.loads(prefixed.get(f"{what}/{member}")) for member in MEMBERS}

    return Neighbors.meet(MEMBERS[rank], share, 20)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), len(MEMBERS))
    group, seen = make_group(store, "shared", rank), dict[str, Any]()
    names = ("all", "unequal", *LAST_CASES)
    near = {name: neighbors(store, f"near {name}", rank) for name in (*names, "half_sent")}
    far = {case: GroupTransport(make_group(store, case, rank), MEMBERS) for case in LAST_CASES}
    seen["wrong_groups"] = wrong_groups(group)
    open_to_the_end = make_group(store, "given up", rank)
    seen["given_up"] = given_up(rank, open_to_the_end)
    seen["near"] = sorted(near["all"].members)
    for way, ends in (("gloo", GroupTransport(group, MEMBERS)), ("near", near["all"])):
        seen |= {f"{way} {case.__name__}": case(rank, ends) for case in CASES}
    seen["unequal_lengths"] = unequal_lengths(rank, near["unequal"])
    for way, kinds in (("gloo", far), ("near", near)):
        seen[f"{way} silent_member"] = silent_member(rank, kinds["silent_member"])
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    dying = [(way, kinds["dying_member"]) for way, kinds in (("gloo", far), ("near", near))]
    waiting = [(way, ends.receive(torch.zeros(10), MEMBERS[2], 1)) for way, ends in dying if rank != 2]
    seen["half_sent"] = half_sent(rank, near["half_sent"])  # rank 2 ends here
    for way, handle in waiting:
        seen[f"{way} dying_member"] = outcome(lambda: handle, 20.0)  # noqa: B023
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
