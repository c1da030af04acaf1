"""One rank of the steps "batches" and "pulls" of `gpu_steps.py`: measures the moves of switches against raw copies.

torchrun ... gpu_moves_ranks.py FOLDER '{"device": "cuda", "way": "ipc", "size": "125M", "dtype": "bf16", ...}'

"way" is "nccl" for batches by the accelerator's own library, compared with one group call of raw sends and receives; or
"ipc" for reads of other ranks' memory, compared with one raw copy from each of these ranks. With NCCL each rank gets a
card of its own if there are enough cards; otherwise each rank acts as a host of its own. "device" is "lab" for the
device without hardware in `tests/device`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from launch import Notes

MEMBERS, NCCL = int(os.environ.get("WORLD_SIZE", "4")), "nccl"
SMALL, LARGE = ({"data": size, "zero_stage": 1} for size in (MEMBERS // 2, MEMBERS))
CUT = {"data": MEMBERS, "zero_stage": 3}
CHANGES = {
    f"{MEMBERS // 2}→{MEMBERS}": (SMALL, LARGE),
    f"{MEMBERS}→{MEMBERS // 2}": (LARGE, SMALL),
    "stage 1→3": (LARGE, CUT),
    "stage 3→1": (CUT, LARGE),
}
BUDGET_BYTES = 1 << 30
SECONDS = 120.0
NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPES = {dtype.itemsize: dtype for dtype in NAMED.values()}


class Tools(NamedTuple):
    """The tools with which a rank measures.

    link: the connection between devices by a library; None if memory is read.
    memory: access to other ranks' memory; None if a library is used.
    device: the device of the rank's state.
    """

    rank: int
    link: Any
    memory: Any
    host: Any
    device: torch.device
    meet: Callable[[], object]


def connected(device: str, way: str) -> Tools:
    """Connect all ranks, over the host and, if that is the way, by the accelerator's library."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if device == "lab":
        importlib.import_module("tests.device.accelerator").use()
    import torch.distributed as td
    from deepspeed.accelerator import get_accelerator

    from ds_dynatrain.adapters.groups.communicators import CommunicatorLink, Endpoint, go_on, make_communicator
    from ds_dynatrain.adapters.groups.device import compute_device
    from ds_dynatrain.adapters.groups.process_groups import make_group
    from ds_dynatrain.adapters.groups.worlds import launch_store
    from ds_dynatrain.transfer import GroupTransport, device_memory
    from tests.gpu.staging import be_a_host

    rank, ranks = int(os.environ["RANK"]), tuple(range(MEMBERS))
    accelerator = get_accelerator()
    has_own_card = way == NCCL and accelerator.device_count() >= MEMBERS
    if not has_own_card:
        be_a_host()
    accelerator.set_device(rank if has_own_card else 0)
    td.init_process_group("gloo")
    group, store = make_group(launch_store(), "bench_moves", rank, MEMBERS, SECONDS)
    host, there, link = GroupTransport(group, ranks), compute_device(), None
    if way != NCCL:
        return Tools(rank, link, device_memory(there), host, there, td.barrier)
    communicator = make_communicator(Endpoint("bench_moves", ranks, rank, store), SECONDS)
    link = CommunicatorLink(communicator, rank, ranks, go_on)
    return Tools(rank, link, None, host, there, td.barrier)


def space(size: str, dtype: str, layout: Any) -> Any:
    """Return the parameter space of a GPT with fp32 masters and moments, held by the first members.

    dtype: the type of its weights.
    """
    from workload import GPT, SIZES

    from ds_dynatrain.space import LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds

    with torch.device("meta"):
        named = GPT(**SIZES[size]).named_parameters()
    tensors = [LogicalTensor(name, tuple(held.shape), 0) for name, held in named]
    members = tuple(range(layout.world_size))
    return VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(NAMED[dtype].itemsize), layout, members)


def buffers(vps: Any, layout: Any, rank: int, device: torch.device) -> dict[Any, torch.Tensor]:
    """Return a rank's buffers, filled with a number of its own; {} if the rank is not in the layout."""
    if rank >= layout.world_size:
        return {}
    sizes = vps.local(layout, rank).sizes()
    dtypes = {kind.name: DTYPES[kind.itemsize] for kind in vps.kinds}
    return {
        key: torch.full((size,), 1.0 + rank, dtype=dtypes[key[0]], device=device)
        for key, size in sizes.items()
        if key[0] in dtypes
    }


def wall_ms(tools: Tools, repeats: int, work: Callable[[], object]) -> float:
    """Return the median milliseconds of a call after one that does not count. All ranks begin together."""
    times = []
    for _ in range(repeats + 1):
        tools.meet()
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[1:])


def digest(vps: Any, layout: Any, rank: int, held: dict[Any, torch.Tensor], kind: str) -> torch.Tensor:
    """Return the digest of each tensor of a kind, summed over the parts of all members."""
    import torch.distributed as td

    from ds_dynatrain.reshard.certificate import side_digests

    mine = torch.zeros(len(vps.tensors), dtype=torch.int64)
    if held:
        sums, _ = side_digests(vps, layout, rank, held, (kind,))
        mine = torch.from_numpy(sums[kind].view("int64").copy())
    td.all_reduce(mine)
    return mine


def measured(tools: Tools, wanted: dict[str, Any], before: Any, after: Any) -> dict[str, Any]:
    """Measure one change. Return the milliseconds of moves and of raw copies, the bytes received, and whether all is
    right.
    """
    from ds_dynatrain.plan import plan_switch
    from ds_dynatrain.space import MASTER, Layout
    from ds_dynatrain.transfer import Batching, ReadyPlan, Sharing, execute

    source, target = Layout(**before), Layout(**after)
    vps, rank = space(wanted["size"], wanted["dtype"], source), tools.rank
    plan = plan_switch(vps, target, tuple(range(target.world_size))).for_member(rank)
    others, kinds = frozenset(range(MEMBERS)) - {rank}, frozenset(kind.name for kind in vps.kinds)
    batching = None if tools.link is None else Batching(others, kinds, MEMBERS - 1, BUDGET_BYTES)
    sharing = None if tools.memory is None else Sharing(tools.memory, others, kinds)
    ready = ReadyPlan.of(plan, BUDGET_BYTES, False, sharing, batching)
    held, made = buffers(vps, source, rank, tools.device), buffers(vps, target, rank, tools.device)
    given = ready, held, made, tools.host, SECONDS, tools.link
    moves = wall_ms(tools, wanted["repeats"], lambda: execute(*given))
    is_there = bool((digest(vps, source, rank, held, MASTER) == digest(vps, target, rank, made, MASTER)).all())
    with (raw_reads if tools.link is None else raw_batches)(tools, ready) as (raw, received):
        raw_ms = wall_ms(tools, wanted["repeats"], raw)
    return {"ms": moves, "raw_ms": raw_ms, "bytes": received, "has_arrived": is_there}


@contextmanager
def raw_batches(tools: Tools, ready: Any) -> Iterator[tuple[Callable[[], None], int]]:
    """Context manager with (function that makes one raw group call with the plan's bytes for each peer, bytes
    received).
    """

    def sized(bundles: Any) -> torch.Tensor:
        nbytes = sum(parcel.nbytes for bundle in bundles for parcel in bundle)
        return torch.empty(nbytes, dtype=torch.uint8, device=tools.device)

    sends = [(sized(each.outgoing), each.peer) for each in ready.phases[0].batches.exchanges]
    receives = [(sized(each.incoming), each.peer) for each in ready.phases[0].batches.exchanges]
    sends, receives = ([each for each in messages if each[0].numel()] for messages in (sends, receives))

    def raw() -> None:
        tools.link.run(lambda: tools.link.exchange(sends, receives), time.monotonic() + SECONDS, "raw", [])

    yield raw, sum(data.numel() for data, _ in receives)


@contextmanager
def raw_reads(tools: Tools, ready: Any) -> Iterator[tuple[Callable[[], None], int]]:
    """Context manager with (function that makes one raw copy from each peer's memory with the plan's bytes, bytes
    read).
    """
    import torch.distributed as td

    from ds_dynatrain.transfer.device_memory import HANDLE_BYTES
    from ds_dynatrain.transfer.series import Matrix

    wanted = torch.zeros(MEMBERS, dtype=torch.int64)
    for pull in ready.phases[0].pulls:
        wanted[pull.peer] = int(pull.theirs.length.sum())
    by_all = [torch.zeros_like(wanted) for _ in range(MEMBERS)]
    td.all_gather(by_all, wanted)
    most = max(int(each[tools.rank]) for each in by_all)
    lent = torch.zeros(max(1, most), dtype=torch.uint8, device=tools.device)
    into = torch.zeros(max(1, int(wanted.sum())), dtype=torch.uint8, device=tools.device)
    tools.memory.synchronize()
    handle, offset = tools.memory.share(lent)
    records = [torch.zeros(HANDLE_BYTES + 8, dtype=torch.uint8) for _ in range(MEMBERS)]
    td.all_gather(records, torch.tensor([*handle, *offset.to_bytes(8, "little")], dtype=torch.uint8))
    opened, reads, at = [], [], 0
    for peer in wanted.nonzero().flatten().tolist():
        record, nbytes = bytes(records[peer].tolist()), int(wanted[peer])
        opened.append(tools.memory.open(record[:HANDLE_BYTES]))
        begin = opened[-1] + int.from_bytes(record[HANDLE_BYTES:], "little")
        reads.append((begin, Matrix(0, 0, 0, 1, nbytes), into, Matrix(0, at, 0, 1, nbytes)))
        at += nbytes

    def raw() -> None:
        for read in reads:
            tools.memory.read(*read)
        tools.memory.synchronize()

    yield raw, at
    for each in opened:
        tools.memory.close(each)
    tools.meet()  # no rank reads the lent memory any more


def main() -> None:
    """Measure each change."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    tools = connected(wanted["device"], wanted["way"])
    notes = Notes(folder, tools.rank)
    for name, (before, after) in CHANGES.items():
        notes.write({"change": name, **measured(tools, wanted, before, after)})


if __name__ == "__main__":
    main()
