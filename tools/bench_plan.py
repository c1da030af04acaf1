"""Measure planning: one rank's part of a switch in small and large worlds, and the assignment of slots.

python tools/bench_plan.py
python tools/bench_plan.py --write docs/figures

The models have the shapes of Llama 3, of Qwen3-235B-A22B and of DeepSeek-V3 (with experts stacked as by AutoEP), in
bf16 with fp32 masters and Adam, on nodes of 8 members. Only the plan is allocated. `plan` is what each training member
computes for itself; `slots` is the same on every member.
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

from ds_dynatrain.plan import assign_slots, nearest, plan_switch
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

RANKS = (8, 128, 1024, 16384)
BAR_SECONDS, BAR_BYTES, BAR_BLOCKS = 1.0, 300 * 10**6, 20_000
CHANGES: tuple[tuple[str, str, dict[str, int], dict[str, int]], ...] = (
    ("70B", "data N→N-1", {}, {"fewer": 1}),
    ("70B", "data N→N-1, stage 3", {"zero_stage": 3}, {"zero_stage": 3, "fewer": 1}),
    ("70B", "tensor 8→4", {"tensor": 8}, {"tensor": 4}),
    ("70B", "tensor 4→8", {"tensor": 4}, {"tensor": 8}),
    ("70B", "tensor 8, pipe 4→tensor 4, pipe 8", {"tensor": 8, "pipe": 4}, {"tensor": 4, "pipe": 8}),
    ("405B", "tensor 8→4", {"tensor": 8}, {"tensor": 4}),
    ("405B", "tensor 4→8", {"tensor": 4}, {"tensor": 8}),
    ("Qwen3-235B", "expert 64→32", {"expert": 64}, {"expert": 32}),
    ("Qwen3-235B", "expert 64, tensor 4→8", {"expert": 64, "tensor": 4}, {"expert": 64, "tensor": 8}),
    ("Qwen3-235B", "expert 64, pipe 16→8", {"expert": 64, "pipe": 16}, {"expert": 64, "pipe": 8}),
    ("DeepSeek-V3", "expert 64→32", {"expert": 64}, {"expert": 32}),
    ("DeepSeek-V3", "expert 64, tensor 8→4", {"expert": 64, "tensor": 8}, {"expert": 64, "tensor": 4}),
)
"""The changes, of which the last target rank's part is planned. The data axis gets the size that is left by the other
axes. If there are too few ranks, pipe and expert are smaller."""
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
    (
        "on nodes of 8: 16,384 ranks, expert 64→32",
        Layout(data=16384, expert=64, zero_stage=1),
        Layout(data=16384, expert=32, zero_stage=1),
    ),
    ("data 8192→16384", Layout(data=8192, zero_stage=1), Layout(data=16384, zero_stage=1)),
    ("data 16384→16383, stage 3", Layout(data=16384, zero_stage=3), Layout(data=16383, zero_stage=3)),
)
OWNERS = ((8, 7), (4, 3), (3, 4), (8, 6), (16, 15), (32, 31), (4, 8))
"""Numbers of data ranks before and after."""
NODES = "on nodes"
"""Start of the names of rows whose members are on nodes of 8."""


ROWS, COLUMNS = 0, 1
"""The dim that the tensor axis cuts."""
Shapes = dict[str, tuple[tuple[int, ...], int | None]]
"""Map from name to (shape, the dim that the tensor axis cuts or None). Tensors of experts have "experts" in their
names."""


def with_queries(layers: int, width: int, words: int, heads: int, keys: int, feed: int, experts: int = 0) -> Shapes:
    """Return the shapes of a Llama or, with `experts`, of a Qwen3. Heads have 128 elements; gate and up are two
    matrices.
    """
    found: Shapes = {"embedding": ((words, width), ROWS), "norm": ((width,), None), "head": ((words, width), ROWS)}
    for layer in range(layers):
        cut = ROWS if keys >= 8 else None
        found |= {f"{layer}.{name}": ((width,), None) for name in ("norm_attention", "norm_feed")}
        found |= {f"{layer}.q": ((heads * 128, width), ROWS), f"{layer}.out": ((width, heads * 128), COLUMNS)}
        found |= {f"{layer}.{name}": ((keys * 128, width), cut) for name in ("k", "v")}
        if experts:
            found |= {f"{layer}.{name}": ((128,), None) for name in ("q_norm", "k_norm")}
        found |= feed_forward(layer, width, feed, experts)
    return found


def with_latent_queries(layers: int, width: int, words: int, dense: int, feed: int, experts: int) -> Shapes:
    """Return the shapes of a DeepSeek-V3, whose first `dense` layers have no experts."""
    found: Shapes = {"embedding": ((words, width), ROWS), "norm": ((width,), None), "head": ((words, width), ROWS)}
    for layer in range(layers):
        for name, shape, cut in (
            ("q_a", (1536, width), None),
            ("q_b", (24576, 1536), ROWS),
            ("kv_a", (576, width), None),
            ("kv_b", (32768, 512), ROWS),
            ("out", (width, 16384), COLUMNS),
        ):
            found[f"{layer}.{name}"] = shape, cut
        for name, size in (("norm_attention", width), ("norm_feed", width), ("q_norm", 1536), ("kv_norm", 512)):
            found[f"{layer}.{name}"] = (size,), None
        found |= feed_forward(layer, width, feed if layer >= dense else 9 * feed, experts if layer >= dense else 0)
        if layer >= dense:
            found |= feed_forward(f"{layer}.shared", width, feed, 0)
    return found


def feed_forward(layer: object, width: int, feed: int, experts: int) -> Shapes:
    """Return the shapes of gate, up and down of a layer; with `experts`, they are stacked and there is a router."""
    each = {"w1": ((feed, width), ROWS), "w3": ((feed, width), ROWS), "w2": ((width, feed), COLUMNS)}
    if not experts:
        return {f"{layer}.{name}": held for name, held in each.items()}
    stacked: Shapes = {f"{layer}.experts.{name}": ((experts, *shape), None) for name, (shape, _) in each.items()}
    return {f"{layer}.router": ((experts, width), None), **stacked}


MODELS: dict[str, tuple[int, Callable[[], Shapes]]] = {
    "8B": (32, lambda: with_queries(32, 4096, 128256, 32, 8, 14336)),
    "70B": (80, lambda: with_queries(80, 8192, 128256, 64, 8, 28672)),
    "405B": (126, lambda: with_queries(126, 16384, 128256, 128, 8, 53248)),
    "Qwen3-235B": (94, lambda: with_queries(94, 4096, 151936, 64, 4, 1536, 128)),
    "DeepSeek-V3": (61, lambda: with_latent_queries(61, 7168, 129280, 3, 2048, 256)),
}
"""Map from a model's name to (number of layers, function that returns its shapes)."""


def space(layout: Layout, model: str = "Qwen3-235B") -> VirtualParameterSpace:
    """Return the parameter space of a model in a layout, with member r at rank r.

    Experts are in an optimizer group of their own, as in DeepSpeed.
    """
    layers, shapes = MODELS[model]
    every = dict(sorted(shapes().items(), key=lambda item: ".experts." in item[0]))  # tensors ordered by group
    tensors = [
        LogicalTensor(name, shape, int(".experts." in name), ".experts." in name) for name, (shape, _) in every.items()
    ]

    def partition(wanted: Layout) -> Partition:
        return tuple(cuts(name, *each, layers, wanted) for name, each in every.items())

    return VirtualParameterSpace.of(
        tensors, ZeroRules(), standard_kinds(2), layout, range(layout.world_size), partition
    )


def cuts(name: str, shape: tuple[int, ...], dim: int | None, layers: int, layout: Layout) -> AxisCuts:
    """Return how a layout cuts one tensor.

    Layers are divided evenly over stages, with the embedding on the first stage, and everything else on the last one.
    """
    ends = {"embedding": 0, "norm": layers - 1, "head": layers - 1}
    layer = ends[name] if name in ends else int(name.split(".")[0])
    of_expert = uneven(0, [shape[0] // layout.expert] * layout.expert) if ".experts." in name else None
    of_tensor = uneven(dim, [shape[dim] // layout.tensor] * layout.tensor) if dim is not None else None
    return AxisCuts((layer * layout.pipe // layers,), of_expert, None if of_expert else of_tensor)


def layout_of(
    ranks: int, zero_stage: int = 1, tensor: int = 1, pipe: int = 1, expert: int = 1, fewer: int = 0
) -> Layout:
    """Return the layout with these sizes, or with smaller ones if there are too few ranks."""
    pipe = min(pipe, ranks // tensor)
    data, expert = ranks // (tensor * pipe) - fewer, min(expert, ranks // pipe)
    return Layout(zero_stage=zero_stage, data=data, tensor=tensor, pipe=pipe, expert=expert)


def part(model: str, source: Layout, target: Layout) -> tuple[float, float, int, int]:
    """Plan the last target rank's part. Return (CPU seconds, MB above the imports, number of blocks, number
    of peers).
    """
    before, vps = resident_bytes(), space(source, model)
    begin = time.process_time()
    nodes = {member: f"{member // 8}" for member in range(max(source.world_size, target.world_size))}
    mine = plan_switch(vps, target, range(target.world_size), nodes=nodes).for_member(target.world_size - 1)
    seconds = time.process_time() - begin
    blocks = len(mine.local) + len(mine.derived) + sum(len(each.sends) + len(each.receives) for each in mine.exchanges)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, (peak - before) / 1e6, blocks, len({each.peer for each in mine.exchanges})


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def plan_row(model: str, name: str, source: dict[str, int], target: dict[str, int]) -> tuple[float, list[object]]:
    """Return (seconds with the most ranks, row about one change with each number of ranks)."""
    cells, is_met, seconds = list[str](), True, 0.0
    for ranks in RANKS:
        layouts = layout_of(ranks, **source), layout_of(ranks, **target)
        seconds, megabytes, blocks, peers = in_a_process_of_its_own(part, model, *layouts)
        cells.append(f"{seconds:.2f} s, {megabytes:.0f} MB, {blocks:,} blocks, {peers} peers")
        is_met &= seconds <= BAR_SECONDS and megabytes * 1e6 <= BAR_BYTES
    return seconds, [f"{model}, {name}", *cells, "pass" if is_met else "missed"]


def slots_row(name: str, source: Layout, target: Layout) -> list[object]:
    """Return a row about the assignment of all members to slots."""
    vps = space(source)
    members = range(max(source.world_size, target.world_size))
    nodes = {member: str(member // 8 if name.startswith(NODES) else 0) for member in members}
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = assign_slots(vps, target, members, nodes)
    seconds, peak = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = f", {len({nodes[member] for member in found.members})} nodes used" if name.startswith(NODES) else ""
    excess = found.bytes_moved - found.bytes_bound
    return [name, f"{seconds:.2f} ({(peak - before) * 1024 / 1e6:.0f} MB, {excess} B above the bound{used})"]


def seven_billion() -> list[LogicalTensor]:
    """Return the tensors of Llama 7B."""
    shapes = with_queries(32, 4096, 32000, 32, 32, 11008)
    ends = {name: shapes.pop(name) for name in ("norm", "head")}
    return [LogicalTensor(name, shape) for name, (shape, _) in {**shapes, **ends}.items()]


def owners_cell(source: int, target: int) -> str:
    """Return text with the share of masters and moments that moves, in DeepSpeed's order and in ours, and the least
    possible.
    """
    layouts = [Layout(data=data, zero_stage=2) for data in (source, target)]
    vps = VirtualParameterSpace.of(seven_billion(), ZeroRules(), standard_kinds(2), layouts[0], range(source))
    found, _ = nearest(vps, layouts[1], range(target))
    plain, ours = (
        assign_slots(vps, each, range(target), kinds=["master"]).bytes_moved / (4 * len(vps.line))
        for each in (layouts[1], found)
    )
    return f"{source}→{target} {plain:.3f}, {ours:.3f} (bound {abs(target - source) / max(source, target):.3f})"


def in_a_process_of_its_own(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, so that the peak memory of one row does not affect another."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    asked = parser.parse_args()
    rows = [(row[0], *plan_row(*row)) for row in CHANGES]
    slowest = {model: row for model, _, row in sorted(rows, key=lambda each: each[1])}
    passed = sum(row[-1] == "pass" for *_, row in rows)
    slots = [in_a_process_of_its_own(slots_row, *row) for row in SLOTS]
    owners = "; ".join(owners_cell(*row) for row in OWNERS)
    bar = f"bar {BAR_SECONDS:.0f} s, {BAR_BYTES // 10**6} MB"
    head = ("one rank's part", *(f"{ranks:,} ranks" for ranks in RANKS), bar)
    layouts = layout_of(8, tensor=8), layout_of(8, tensor=4)
    *_, blocks, _ = in_a_process_of_its_own(part, "8B", *layouts)
    verdict = "pass" if blocks <= BAR_BLOCKS else "missed"
    taken = "; ".join(f"{name} {seconds}" for name, seconds in slots)
    text = (
        f"Measured on: {machine()}. Seconds to assign all slots: {taken}. Llama 8B, tensor 8→4 on 8 ranks: {blocks:,} "
        f"blocks for one rank (bar {BAR_BLOCKS:,}: {verdict}). CPU seconds include the mesh; memory is above that of "
        f"the import. Share of masters and moments that moves for Llama 7B at stage 2, if the last ranks leave, with "
        f'"owners" "deepspeed" and "nearest": {owners}. {passed} of {len(rows)} changes pass; the table has the '
        f"slowest one of each model.\n\n{table(head, slowest.values())}"
    )
    print(text)
    if asked.write:
        keep(asked.write, "bench_plan", text)


if __name__ == "__main__":
    main()
