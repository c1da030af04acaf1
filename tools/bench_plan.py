"""Measure planning: one rank's part of a switch in a large world, and who takes which slot.

python tools/bench_plan.py
python tools/bench_plan.py --write docs/figures

The model is a mixture of experts of 235 billion parameters (the shapes of Qwen3-235B-A22B: 94 layers of 128 experts,
stacked as AutoEP has them), in bf16 with fp32 masters and Adam. Nothing is allocated but the plan. `plan` is what a
member that trains computes for itself; `slots` is the same on every member.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from figures import keep, machine, table

from ds_dynatrain.plan import assign_slots, plan_switch
from ds_dynatrain.space import (
    AxisCuts,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
    uneven,
)

LAYERS, WIDTH, WORDS, HEADS, KEYS, HEAD = 94, 4096, 151936, 64, 4, 128
EXPERTS, FEED = 128, 1536
BAR_SECONDS, BAR_BYTES = 1.0, 10**9
PLANS: tuple[tuple[str, Layout, Layout], ...] = (
    ("data 16384→16383", Layout(data=16384, zero_stage=1), Layout(data=16383, zero_stage=1)),
    ("the same in stage 3", Layout(data=16384, zero_stage=3), Layout(data=16383, zero_stage=3)),
    ("stage 1→3", Layout(data=16384, zero_stage=1), Layout(data=16384, zero_stage=3)),
    ("expert 64→32", Layout(data=16384, expert=64, zero_stage=1), Layout(data=16384, expert=32, zero_stage=1)),
    (
        "expert 64, tensor 4→8",
        Layout(data=4096, tensor=4, expert=64, zero_stage=1),
        Layout(data=2048, tensor=8, expert=64, zero_stage=1),
    ),
    ("pipe 16→8", Layout(pipe=16, data=1024, zero_stage=1), Layout(pipe=8, data=2048, zero_stage=1)),
)
"""Of 16,384 ranks; what is planned is the part of the last rank of the target."""
SLOTS: tuple[tuple[str, Layout, Layout], ...] = (
    ("data 64→63", Layout(data=64, zero_stage=1), Layout(data=63, zero_stage=1)),
    ("data 256→255", Layout(data=256, zero_stage=1), Layout(data=255, zero_stage=1)),
    (
        "64 ranks, expert 8, tensor 4→8",
        Layout(data=16, tensor=4, expert=8, zero_stage=1),
        Layout(data=8, tensor=8, expert=8, zero_stage=1),
    ),
    ("64 ranks, expert 8→16", Layout(data=64, expert=8, zero_stage=1), Layout(data=64, expert=16, zero_stage=1)),
    ("256 ranks, pipe 4→8", Layout(data=64, pipe=4, zero_stage=1), Layout(data=32, pipe=8, zero_stage=1)),
    ("data 16384→16383", Layout(data=16384, zero_stage=1), Layout(data=16383, zero_stage=1)),
    (
        "16,384 ranks, expert 64→32",
        Layout(data=16384, expert=64, zero_stage=1),
        Layout(data=16384, expert=32, zero_stage=1),
    ),
    ("16,384 ranks, pipe 16→8", Layout(pipe=16, data=1024, zero_stage=1), Layout(pipe=8, data=2048, zero_stage=1)),
    ("on nodes of 8: data 64→32", Layout(data=64, zero_stage=1), Layout(data=32, zero_stage=1)),
    (
        "on nodes of 8: expert 64, data 128→64",
        Layout(data=128, expert=64, zero_stage=1),
        Layout(data=64, expert=64, zero_stage=1),
    ),
)
NODES = "on nodes"
"""The beginning of rows whose members are on nodes of 8."""


ROWS, COLUMNS = 0, 1
"""The dim that the tensor axis cuts."""


def shapes() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Name -> (shape, the dim that the tensor axis cuts or None); experts are those whose name has the word."""
    found: dict[str, tuple[tuple[int, ...], int | None]] = {"embedding": ((WORDS, WIDTH), ROWS)}
    for layer in range(LAYERS):
        for name, rows in (("q", HEADS * HEAD), ("k", KEYS * HEAD), ("v", KEYS * HEAD)):
            found[f"{layer}.{name}"] = ((rows, WIDTH), ROWS if name == "q" else None)
        found[f"{layer}.out"] = ((WIDTH, HEADS * HEAD), COLUMNS)
        found.update({f"{layer}.{name}": ((size,), None) for name, size in (("q_norm", HEAD), ("k_norm", HEAD))})
        found.update({f"{layer}.{name}": ((WIDTH,), None) for name in ("norm_attention", "norm_feed")})
        found[f"{layer}.router"] = ((EXPERTS, WIDTH), None)
        for name, shape in (("w1", (FEED, WIDTH)), ("w2", (WIDTH, FEED)), ("w3", (FEED, WIDTH))):
            found[f"{layer}.experts.{name}"] = ((EXPERTS, *shape), None)
    found["norm"] = ((WIDTH,), None)
    found["head"] = ((WORDS, WIDTH), ROWS)
    return dict(sorted(found.items(), key=lambda item: ".experts." in item[0]))  # groups in order


def space(layout: Layout) -> VirtualParameterSpace:
    """The model in a layout, member r at rank r; experts in an optimizer group of their own, as DeepSpeed puts them."""
    every = shapes()
    tensors = [
        LogicalTensor(name, shape, int(".experts." in name), ".experts." in name) for name, (shape, _) in every.items()
    ]

    def partition(wanted: Layout) -> Partition:
        return tuple(cuts(name, *each, wanted) for name, each in every.items())

    return VirtualParameterSpace.of(
        tensors, ZeroRules(), standard_kinds(2), layout, range(layout.world_size), partition
    )


def cuts(name: str, shape: tuple[int, ...], dim: int | None, layout: Layout) -> AxisCuts:
    """How a layout deals one tensor out: layers to stages evenly, the embedding to the first, the rest to the last."""
    ends = {"embedding": 0, "norm": LAYERS - 1, "head": LAYERS - 1}
    layer = ends[name] if name in ends else int(name.split(".")[0])
    of_expert = uneven(0, [EXPERTS // layout.expert] * layout.expert) if ".experts." in name else None
    of_tensor = uneven(dim, [shape[dim] // layout.tensor] * layout.tensor) if dim is not None else None
    return AxisCuts((layer * layout.pipe // LAYERS,), of_expert, of_tensor)


def plan_row(name: str, source: Layout, target: Layout) -> list[object]:
    """What the last rank of the target needs to know its part, from nothing but the two layouts."""
    vps = space(source)
    begin = time.process_time()
    plan = plan_switch(vps, target, range(target.world_size))
    mine = plan.for_member(target.world_size - 1)
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    moved = f"{sum(exchange.receives.nbytes for exchange in mine.rounds) / 1e6:.1f}"
    verdict = "pass" if seconds <= BAR_SECONDS and peak <= BAR_BYTES else "missed"
    return [name, moved, len(mine.rounds), f"{seconds:.2f}", f"{peak / 1e6:.0f}", verdict]


def slots_row(name: str, source: Layout, target: Layout) -> list[object]:
    """The assignment of all members."""
    vps = space(source)
    members = range(max(source.world_size, target.world_size))
    nodes = {member: str(member // 8 if name.startswith(NODES) else 0) for member in members}
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = assign_slots(vps, target, members, nodes)
    seconds, peak = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = f", {len({nodes[member] for member in found.members})} nodes used" if name.startswith(NODES) else ""
    excess = found.bytes_moved - found.bytes_bound
    return [name, f"{seconds:.2f} ({(peak - before) * 1024 / 1e6:.0f} MB, {excess} B above the bound{used})"]


def in_a_process_of_its_own(work: Callable[..., list[object]], *arguments: Any) -> list[object]:
    """So that one row's memory is not another's peak."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    asked = parser.parse_args()
    plans = [in_a_process_of_its_own(plan_row, *row) for row in PLANS]
    slots = [in_a_process_of_its_own(slots_row, *row) for row in SLOTS]
    head = (
        "16,384 ranks",
        "received MB",
        "peers",
        "plan s",
        "peak MB",
        f"bar {BAR_SECONDS:.0f} s, {BAR_BYTES // 10**6} MB",
    )
    taken = "; ".join(f"{name} {seconds}" for name, seconds in slots)
    text = f"Measured on: {machine()}. Seconds to assign all slots: {taken}.\n\n{table(head, plans)}"
    print(text)
    if asked.write:
        keep(asked.write, "bench_plan", text)


if __name__ == "__main__":
    main()
