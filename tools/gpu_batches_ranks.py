"""One rank of the step "batches" of `gpu_steps.py`: the moves of switches in batches, beside raw send and receive.

torchrun ... gpu_batches_ranks.py FOLDER '{"device": "cuda", "size": "125M", "repeats": 5}'

By the accelerator's own library: NCCL takes a card once, or from 2.30 on several times if it is told to. A card for
each rank is taken where there are as many. "device" is "lab" for the one without hardware of `tests/device`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from launch import Notes

MEMBERS = 4
CHANGES = {
    "2→4": ({"data": 2, "zero_stage": 1}, {"data": 4, "zero_stage": 1}),
    "4→2": ({"data": 4, "zero_stage": 1}, {"data": 2, "zero_stage": 1}),
    "stage 1→3": ({"data": 4, "zero_stage": 1}, {"data": 4, "zero_stage": 3}),
    "stage 3→2": ({"data": 4, "zero_stage": 3}, {"data": 4, "zero_stage": 2}),
}
BUDGET_BYTES = 1 << 30
SECONDS = 120.0
DTYPES = {4: torch.float32, 2: torch.bfloat16}


class Tools(NamedTuple):
    """What a rank measures with. link: between devices; device: where its states are."""

    rank: int
    link: Any
    host: Any
    device: torch.device
    meet: Callable[[], object]


def connected(device: str) -> Tools:
    """All ranks are connected, over the host and by the accelerator's library."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if device == "lab":
        importlib.import_module("tests.device.accelerator").use()
    import torch.distributed as td
    from deepspeed.accelerator import get_accelerator

    from ds_dynatrain.adapters.communicators import Endpoint, go_on, make_communicator
    from ds_dynatrain.adapters.device import compute_device
    from ds_dynatrain.adapters.device_link import CommunicatorLink
    from ds_dynatrain.adapters.launch_world import launch_store
    from ds_dynatrain.adapters.process_groups import make_group
    from ds_dynatrain.transfer import GroupTransport

    rank, ranks = int(os.environ["RANK"]), tuple(range(MEMBERS))
    accelerator = get_accelerator()
    accelerator.set_device(rank if accelerator.device_count() >= MEMBERS else 0)
    td.init_process_group("gloo")
    group, store = make_group(launch_store(), "bench_batches", rank, MEMBERS, SECONDS)
    communicator = make_communicator(Endpoint("bench_batches", ranks, rank, store), SECONDS)
    link = CommunicatorLink(communicator, rank, ranks, go_on)
    return Tools(rank, link, GroupTransport(group, ranks), compute_device(), td.barrier)


def space(size: str, layout: Any) -> Any:
    """The logical tensors of a GPT in bf16 with fp32 masters and moments, held by the first members."""
    from workload import GPT, SIZES

    from ds_dynatrain.space import LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds

    with torch.device("meta"):
        named = GPT(**SIZES[size]).named_parameters()
    tensors = [LogicalTensor(name, tuple(held.shape), 0) for name, held in named]
    members = tuple(range(layout.world_size))
    return VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(2), layout, members)


def buffers(vps: Any, layout: Any, rank: int, device: torch.device) -> dict[Any, torch.Tensor]:
    """Those of a rank, filled with what is its own; none where it has no part in the layout."""
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
    """The median, after one that is not counted; all ranks begin together."""
    times = []
    for _ in range(repeats + 1):
        tools.meet()
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[1:])


def digest(vps: Any, layout: Any, rank: int, held: dict[Any, torch.Tensor], kind: str) -> torch.Tensor:
    """Of all members' parts of a kind, one number a tensor."""
    import torch.distributed as td

    from ds_dynatrain.engine.digests import side_digests

    mine = torch.zeros(len(vps.tensors), dtype=torch.int64)
    if held:
        sums, _ = side_digests(vps, layout, rank, held, (kind,), set())
        mine = torch.from_numpy(sums.of[kind].view("int64").copy())
    td.all_reduce(mine)
    return mine


def measured(tools: Tools, size: str, repeats: int, before: Any, after: Any) -> dict[str, Any]:
    """One change: milliseconds of the moves and of the same bytes in one raw group call; whether all has arrived."""
    from ds_dynatrain.plan import plan_switch
    from ds_dynatrain.space import MASTER, Layout
    from ds_dynatrain.transfer import Batching, ReadyPlan, execute

    source, target = Layout(**before), Layout(**after)
    vps, rank = space(size, source), tools.rank
    plan = plan_switch(vps, target, tuple(range(target.world_size)))
    others = frozenset(range(MEMBERS)) - {rank}
    kinds = frozenset(kind.name for kind in vps.kinds)
    batching = Batching(others, kinds, MEMBERS - 1, BUDGET_BYTES)
    ready = ReadyPlan.of(plan.for_member(rank), BUDGET_BYTES, False, None, batching)
    held, made = buffers(vps, source, rank, tools.device), buffers(vps, target, rank, tools.device)
    given = ready, held, made, tools.host, SECONDS, BUDGET_BYTES, False, tools.link
    moves = wall_ms(tools, repeats, lambda: execute(*given))
    peers = [(each.peer, *map(bytes_of, (each.outgoing, each.incoming))) for each in ready.batches.exchanges]
    sends = [(torch.empty(out, dtype=torch.uint8, device=tools.device), peer) for peer, out, _ in peers if out]
    receives = [(torch.empty(into, dtype=torch.uint8, device=tools.device), peer) for peer, _, into in peers if into]

    def raw() -> None:
        tools.link.run(lambda: tools.link.exchange(sends, receives), time.monotonic() + SECONDS, "raw", [])

    is_there = bool((digest(vps, source, rank, held, MASTER) == digest(vps, target, rank, made, MASTER)).all())
    sent = sum(out for _, out, _ in peers)
    return {"ms": moves, "raw_ms": wall_ms(tools, repeats, raw), "bytes": sent, "has_arrived": is_there}


def bytes_of(bundles: Any) -> int:
    """Of all their messages."""
    return sum(parcel.nbytes for bundle in bundles for parcel in bundle)


def main() -> None:
    """Measure each change."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    tools = connected(wanted["device"])
    notes = Notes(folder, tools.rank)
    for name, (before, after) in CHANGES.items():
        notes.write({"change": name, **measured(tools, wanted["size"], wanted["repeats"], before, after)})


if __name__ == "__main__":
    main()
