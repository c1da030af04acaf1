"""How DeepSpeed's ZeRO cuts the line: data in, shardings out.

Read off DeepSpeed 0.19.8: `runtime/zero/stage_1_and_2.py` (flat groups), `runtime/zero/partition_parameters.py`
(parts of a parameter) and `runtime/zero/stage3.py` `_create_fp16_sub_groups`. Padding is part of no sharding, and
neither is what ZeRO-3 gathers and keeps whole for a while (persistent parameters).

The world of a layout is one ZeRO group here, of data x sequence ranks; what else cuts a tensor has been done before
(`mesh`). A tensor of an expert is dealt to others: to those ranks of a pipeline stage that hold the same expert.

| kinds \\ stage            | 0            | 1, 2                             | 3                                  |
|--------------------------|--------------|----------------------------------|------------------------------------|
| master, moments          | tensor, whole| group, the rank's part of it     | subgroup, the rank's parts in order|
| weight, trainable        | tensor, whole| group, whole                     | subgroup, the rank's parts in order|
| weight, frozen           | tensor, whole| tensor, whole                    | partition, the rank's part         |
| stale_grad               | not held     | not held                         | subgroup, the rank's parts in order|
| host_grad                | not held     | group, the rank's part of it     | subgroup, the rank's parts in order|

A moment of whole tensors is cut like a master here; in stages 1 and 2 it overlaps afterwards (`overlapping`).

A flat group lies in the order of registration, its tensors end to end. `round_robin_gradients` deals its tensors to
the ranks in turn: first those at places 0, data, 2 data, ..., then 1, data + 1, ... With `parameter_alignment` each
tensor begins at a multiple of `weight_alignment`. A tensor of no element takes no part in either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ds_dynatrain.space.even import EvenSharding
from ds_dynatrain.space.kind import HOST_GRAD, STALE_GRAD, WEIGHT
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.pieces import BufferId
from ds_dynatrain.space.tensor import Ints, Line


@dataclass(frozen=True)
class ZeroRules:
    """The numbers of a DeepSpeed configuration that decide where ZeRO cuts; all in elements.

    alignment_factor: a flat group is padded to a multiple of alignment_factor x data (stages 1 and 2).
    round_robin_stages: those of stages 1 and 2 whose flat groups deal their tensors to the ranks in turn.
    aligned_stages: those of stages 1 and 2 whose tensors begin at multiples of weight_alignment in a flat group.
    flat_without_zero: stage 0 holds flat groups too, whole and without padding (DeepSpeed's FP16_Optimizer).
    parts_without_zero: stage 0 is cut as stage 1 is (BF16_Optimizer, which DeepSpeed takes there for pipelines).
    sub_group_size: a ZeRO-3 sub-group closes when its parts on a rank reach this sum.
    """

    alignment_factor: int = 2
    round_robin_stages: frozenset[int] = frozenset()
    aligned_stages: frozenset[int] = frozenset()
    weight_alignment: int = 1
    flat_without_zero: bool = False
    parts_without_zero: bool = False
    sub_group_size: int = 10**9


def as_cut(rules: ZeroRules, layout: Layout) -> Layout:
    """The layout whose stage says how a layout is cut: itself, but for `parts_without_zero`."""
    return layout.replace(zero_stage=1) if rules.parts_without_zero and layout.zero_stage == 0 else layout


def is_held(layout: Layout, kind: str) -> bool:
    """Whether the ranks of the layout hold the kind at all."""
    if kind == STALE_GRAD:
        return layout.zero_stage == 3
    return kind != HOST_GRAD or layout.zero_stage > 0


def is_replicated(layout: Layout, kind: str) -> bool:
    """Whether every rank of the layout holds the whole of the kind."""
    if kind in (STALE_GRAD, HOST_GRAD):
        return False
    return layout.zero_stage == 0 or (kind == WEIGHT and layout.zero_stage < 3)


def has_flat_groups(rules: ZeroRules, layout: Layout) -> bool:
    """Whether the tensors of an optimizer group lie end to end in one buffer."""
    return layout.zero_stage in (1, 2) or (layout.zero_stage == 0 and rules.flat_without_zero)


Table = tuple[BufferId, ...]
_Segments = tuple[Ints, Ints, Ints, Ints, Ints, Ints]


def buffer_table(line: Line, rules: ZeroRules, layout: Layout) -> Table:
    """The names that all shardings of a layout number buffers by: of each tensor alone, then of several together.

    Which of them a rank has, and how large they are, is in `buffers_of`.
    """
    tensors, count = len(line.tensors), line.trainable_count
    if layout.zero_stage == 3:
        return _numbered(("partition", tensors), ("subgroup", subgroup_count(line, rules, layout)))
    if has_flat_groups(rules, layout):
        return _numbered(("tensor", tensors), ("group", int(line.groups[:count].max(initial=-1)) + 1))
    return _numbered(("tensor", tensors))


@lru_cache(maxsize=32)
def _numbered(*sorts: tuple[str, int]) -> Table:
    """Buffers 0 to `count` - 1 of each (sort, count); the many shard groups of a mesh have the same object."""
    return tuple(BufferId(place, number) for place, count in sorts for number in range(count))


def sharding(line: Line, rules: ZeroRules, layout: Layout, kind: str, experts: bool = False) -> EvenSharding:
    """How the layout holds the kind, one owner for each element where the kind is not replicated.

    experts: of the expert tensors, over the ranks of their group, or of all others.
    """
    table = buffer_table(line, rules, layout)
    count = len(line.tensors) if is_held(layout, kind) else 0
    if kind != WEIGHT:
        count = min(count, line.trainable_count)
    ranks = group_size(layout, experts)
    if has_flat_groups(rules, layout):
        cut = _flat_groups(line, rules, layout, kind, count, table, ranks)
    elif layout.zero_stage == 3:
        cut = _parts(line, rules, layout, count, table, ranks)
    else:
        cut = _whole(line, count, table, ranks)
    if not line.experts.any():
        return cut
    return cut.only(line.experts[np.searchsorted(line.bases[:-1], cut.start, side="right") - 1] == experts)


def group_size(layout: Layout, experts: bool = False) -> int:
    """Ranks that ZeRO deals a tensor to: data x sequence, of an expert's tensors as many as hold the same expert."""
    return layout.ranks_per_stage // layout.expert if experts else layout.data * layout.sequence


def group_sizes(line: Line, layout: Layout) -> Ints:
    """`group_size` for each tensor."""
    return np.where(line.experts, group_size(layout, experts=True), group_size(layout))


def subgroups(line: Line, rules: ZeroRules, layout: Layout) -> Ints:
    """Number of the ZeRO-3 sub-group of each trainable tensor.

    A group that fits is one sub-group; else one closes with the tensor whose part brings the sum to sub_group_size.
    """
    count = line.trainable_count
    parts = -(-line.numels // group_sizes(line, layout))[:count]
    result = np.zeros(count, np.int64)
    number = -1
    for group in np.unique(line.groups[:count]):
        members = np.flatnonzero(line.groups[:count] == group)
        whole = int(parts[members].sum()) <= rules.sub_group_size
        number, total = number + 1, 0
        for position, tensor in enumerate(members):
            result[tensor] = number
            total += int(parts[tensor])
            if not whole and total >= rules.sub_group_size and position + 1 < len(members):
                number, total = number + 1, 0
    return result


def subgroup_count(line: Line, rules: ZeroRules, layout: Layout) -> int:
    """Number of ZeRO-3's sub-groups of a rank's tensors."""
    return int(subgroups(line, rules, layout).max(initial=-1)) + 1


def flat_order(line: Line, rules: ZeroRules, layout: Layout, group: int) -> tuple[Ints, Ints, int]:
    """A flat group of stages 1 and 2: (tensor numbers in its order, position of each, elements without the tail's pad).

    Tensors of no element are left out, as DeepSpeed does before it numbers them.
    """
    tensors = np.flatnonzero((line.groups == group) & (line.numels > 0))
    if layout.zero_stage in rules.round_robin_stages:
        ranks = group_size(layout, bool(len(tensors)) and bool(line.experts[tensors[0]]))
        tensors = tensors[np.argsort(np.arange(len(tensors)) % ranks, kind="stable")]
    step = rules.weight_alignment if layout.zero_stage in rules.aligned_stages else 1
    numels = line.numels[tensors]
    room = -(-numels // step) * step
    position = np.cumsum(room) - room
    return tensors, position, int(position[-1] + numels[-1]) if len(tensors) else 0


def partition_size(line: Line, rules: ZeroRules, layout: Layout, group: int) -> int:
    """Elements of a rank's part of a flat group under stages 1 and 2, padding included; under stage 0 of all of it."""
    tensors, _, numel = flat_order(line, rules, layout, group)
    if layout.zero_stage == 0:
        return numel
    ranks = group_size(layout, bool(len(tensors)) and bool(line.experts[tensors[0]]))
    step = rules.alignment_factor * ranks
    return -(-numel // step) * step // ranks


def _whole(line: Line, count: int, table: Table, ranks: int) -> EvenSharding:
    numbers = np.arange(count, dtype=np.int64)
    return EvenSharding(
        *_nonempty(line.bases[:count], line.bases[1 : count + 1], line.numels[:count], numbers, np.zeros_like(numbers)),
        buffers=table,
        ranks=ranks,
        replicated=True,
    )


def _flat_groups(
    line: Line, rules: ZeroRules, layout: Layout, kind: str, count: int, table: Table, ranks: int
) -> EvenSharding:
    """Segments of optimizer groups, as long as the line and the flat order agree, then one per frozen tensor."""
    replicated = is_replicated(layout, kind)
    trainable = min(count, line.trainable_count)
    width, position = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for group in np.unique(line.groups[:trainable]).tolist():
        tensors, found, _ = flat_order(line, rules, layout, group)
        position[tensors] = found
        width[tensors] = partition_size(line, rules, layout, group)
    buffer = np.arange(count, dtype=np.int64)
    buffer[:trainable] = len(line.tensors) + line.groups[:trainable]
    filled = np.flatnonzero(line.numels[:count])
    ends, position, buffer = line.bases[filled], position[filled], buffer[filled]
    joined = (np.diff(buffer) == 0) & (np.diff(position) == np.diff(ends))
    first = np.flatnonzero(np.append(True, ~joined))[: len(filled)]
    last = np.append(first[1:], len(filled))[: len(first)] - 1
    start, stop = line.bases[filled[first]], line.bases[filled[last] + 1]
    nothing = np.zeros_like(first)
    return EvenSharding(
        start,
        stop,
        stop - start if replicated else width[filled[first]],
        buffer[first],
        position[first] if replicated else nothing,
        nothing if replicated else position[first],
        buffers=table,
        ranks=ranks,
        replicated=replicated,
    )


def _parts(line: Line, rules: ZeroRules, layout: Layout, count: int, table: Table, ranks: int) -> EvenSharding:
    """One segment per tensor; parts of a sub-group's tensors follow one another, a frozen one's stands alone."""
    trainable = min(count, line.trainable_count)
    width = -(-line.numels // group_sizes(line, layout))[:count]
    number = subgroups(line, rules, layout)[:trainable]
    before = np.cumsum(width[:trainable]) - width[:trainable]
    opens = np.append(True, np.diff(number) > 0)[:trainable]
    at = np.zeros(count, np.int64)
    at[:trainable] = before - np.maximum.accumulate(np.where(opens, before, 0))
    buffer = np.arange(count, dtype=np.int64)
    buffer[:trainable] = number + len(line.tensors)
    return EvenSharding(
        *_nonempty(line.bases[:count], line.bases[1 : count + 1], width, buffer, at),
        buffers=table,
        ranks=ranks,
        replicated=False,
    )


def _nonempty(start: Ints, stop: Ints, width: Ints, buffer: Ints, at: Ints) -> _Segments:
    """The segments that have an element, each with a lead of 0."""
    keep = start < stop
    return start[keep], stop[keep], width[keep], buffer[keep], at[keep], np.zeros_like(start[keep])
