"""Measure the load of senders: the busiest sender and receiver, and bytes between nodes compared with a lower bound.

python tools/bench_senders.py
python tools/bench_senders.py --write docs/figures

Only plans are allocated. The first lines are about a model with 70 billion parameters, in which the boundary between
two pipeline stages moves by one layer. The table is about changes of a small model on 8 nodes of 8 members. Its lower
bound counts, for each node, the elements that a member of the node needs and no member of it holds. The last line is
about random nodes: a linear program computes what the busiest member has to send if replicas are read on a receiver's
own node first.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from figures import keep, machine
from minimum import busiest_ratio, traffic

from ds_dynatrain.plan import SwitchPlan, assign_slots, picture_of, plan_switch
from ds_dynatrain.space import (
    AxisCuts,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    interval,
    standard_kinds,
    uneven,
)

NODE = 8
LARGE, SMALL = (80, 8192, 28672, 128256), (16, 512, 1792, 8192)
"""Number of layers, width, width of the feed-forward layers, and size of the vocabulary."""
BAR_SENDER, BAR_NODES, RANDOM = 1.25, 1.1, 200
SIZES: tuple[dict[str, Any], ...] = (
    {"data": 64},
    {"data": 56},
    {"data": 32},
    {"data": 16, "pipe": 4},
    {"data": 8, "pipe": 8},
    {"data": 16, "pipe": 2},
    {"data": 32, "tensor": 2},
    {"data": 8, "tensor": 8},
    {"data": 8, "tensor": 4, "pipe": 2},
)
"""The layouts of the small model, in stages 1 and 3."""


def space(sizes: tuple[int, int, int, int], layout: Layout) -> VirtualParameterSpace:
    """Return the parameter space of a Llama with 8 key-value heads, with member r at rank r."""
    layers, width, feed, words = sizes
    every: dict[str, tuple[tuple[int, ...], int | None, int]] = {"embedding": ((words, width), 0, 0)}
    for layer in range(layers):
        for name, shape, dim in (
            ("q", (width, width), 0),
            ("kv", (width // 4, width), 0),
            ("out", (width, width), 1),
            ("gate", (2 * feed, width), 0),
            ("down", (width, feed), 1),
            ("norms", (2 * width,), None),
        ):
            every[f"{layer}.{name}"] = shape, dim, layer
    every["head"] = (words, width), 0, layers - 1

    def partition(wanted: Layout) -> Partition:
        borders = wanted.boundaries or tuple(layers * stage // wanted.pipe for stage in range(wanted.pipe + 1))
        found = []
        for shape, dim, layer in every.values():
            stage = max(stage for stage in range(wanted.pipe) if borders[stage] <= layer)
            is_cut = dim is not None and wanted.tensor > 1
            cut = uneven(dim or 0, [shape[dim or 0] // wanted.tensor] * wanted.tensor) if is_cut else None
            found.append(AxisCuts((stage,), tensor=cut))
        return tuple(found)

    tensors = [LogicalTensor(name, shape) for name, (shape, _, _) in every.items()]
    members = range(layout.world_size)
    return VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(2), layout, members, partition)


def senders(ranks: int) -> str:
    """Return a phrase on the traffic when a boundary moves by one layer."""
    borders = tuple(range(0, 81, 10))
    source = Layout(pipe=8, data=ranks // 8, zero_stage=1, boundaries=borders)
    target = source.replace(boundaries=(0, 11, *borders[2:]))
    found = np.array([*traffic(plan_switch(space(LARGE, source), target, range(ranks))).values()])
    sent, received = found.T
    ratio = sent.max() / max(received.max(), sent.mean())
    verdict = "pass" if ratio <= BAR_SENDER else "missed"
    return f"{ranks} ranks {sent.sum() / 1e9:.1f} GB, {ratio:.2f} ({verdict})"


def between_nodes(plan: SwitchPlan, nodes: Mapping[int, str]) -> tuple[int, int, float]:
    """Return (bytes between nodes, lower bound, bytes of the busiest sender / max(busiest receiver, mean))."""
    sides, bound = plan.sides, 0
    numbers = {name: number for number, name in enumerate(sorted({*nodes.values()}))}
    found = picture_of(plan, np.array([numbers[nodes[member]] for member in plan.members]))
    at_source = np.array([nodes[member] for member in sides.vps.members])
    for kind in sides.kinds:
        for node in numbers:
            wanted = [(interval.ints([]), interval.ints([]))]
            for rank in (rank for rank, member in enumerate(sides.members) if nodes[member] == node):
                wanted.append(sides.needs(kind, rank, int(sides.source_ranks[rank])).remote)
            start, stop = interval.union(*interval.join(wanted))
            for rank in np.flatnonzero(at_source == node).tolist():
                for name in kind.sources:
                    held = sides.source(name).holding(rank)
                    _, start, stop = interval.subtract(start, stop, *interval.union(held.start, held.stop))
            bound += int((stop - start).sum()) * kind.itemsize
    busiest = found.gives.max() / max(found.takes.max(), found.gives.mean(), 1)
    return int(found.sent[1].sum()), bound, float(busiest)


def random_nodes(changes: int) -> list[float]:
    """The busiest sender of weights over what one has to send or receive, in changes of random layouts and nodes."""
    chance, found = random.Random(0), list[float]()
    for _ in range(changes):
        source, target = (Layout(zero_stage=1, **chance.choice(SIZES)) for _ in range(2))
        count = max(source.world_size, target.world_size) + chance.randrange(9)
        sizes = chance.randrange(1, 17)
        nodes = {member: f"node-{chance.randrange(sizes)}" for member in range(count)}
        if chance.random() < 0.5:
            nodes = {member: f"node-{member // sizes}" for member in range(count)}
        vps = space(SMALL, source)
        members = assign_slots(vps, target, range(count), nodes).members
        found.append(busiest_ratio(plan_switch(vps, target, members, ("weight",), nodes=nodes), nodes))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the tables: docs/figures")
    asked = parser.parse_args()
    busy = f"Sent, and busiest sender ÷ busiest receiver (bar {BAR_SENDER}): {senders(128)}; {senders(512)}."
    print(busy, flush=True)
    nodes, rows, known = {member: f"node-{member // NODE}" for member in range(64)}, list[list[object]](), 0
    for number, (before, after) in enumerate(itertools.permutations(SIZES, 2)):
        stages = (1, 3) if number % 4 == 3 else (1, 1)
        source, target = Layout(zero_stage=stages[0], **before), Layout(zero_stage=stages[1], **after)
        plan = plan_switch(space(SMALL, source), target, range(target.world_size), nodes=nodes)
        crossed, bound, busiest = between_nodes(plan, nodes)
        known += crossed <= BAR_NODES * bound
        ratio = f"{crossed / bound:.2f}" if bound else "1.00" if not crossed else "none needed"
        rows.append([f"{source} → {target}", f"{crossed / 1e6:.0f}", f"{bound / 1e6:.0f}", ratio, f"{busiest:.2f}"])
        print(*rows[-1], sep=" | ", flush=True)
    ratios = random_nodes(RANDOM)
    text = (
        f"Bytes between nodes are within {BAR_NODES} of their bound in {known} of {len(rows)} changes. On random "
        f"nodes, the busiest sender of weights sends {max(ratios):.2f} times of what one has to, at most; "
        f"{BAR_SENDER} or less in {sum(ratio <= BAR_SENDER for ratio in ratios)} of {RANDOM} changes."
    )
    print(text)
    if asked.write:
        keep(asked.write, "bench_senders", f"Measured on: {machine()}. {busy} {text}")


if __name__ == "__main__":
    main()
