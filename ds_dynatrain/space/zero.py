"""How DeepSpeed's ZeRO partitions tensors: pure functions from a layout to shardings.

The rules follow DeepSpeed 0.19.8: `runtime/zero/stage_1_and_2.py` (flat groups), `runtime/zero/partition_parameters.py`
(parts of a parameter) and `runtime/zero/stage3.py` `_create_fp16_sub_groups`. Shardings include neither padding nor the
gathered copies that ZeRO-3 keeps for a while (persistent parameters).

This module sees one ZeRO group of data x sequence ranks; the pipe, expert and tensor axes have been applied before
(`mesh`). An expert's tensor is partitioned over other ranks: those of a pipeline stage that hold the same expert.

| kinds \\ stage            | 0            | 1, 2                             | 3                                  |
|--------------------------|--------------|----------------------------------|------------------------------------|
| master, moments          | tensor, whole| group, the rank's part of it     | subgroup, the rank's parts in order|
| weight, trainable        | tensor, whole| group, whole                     | subgroup, the rank's parts in order|
| weight, frozen           | tensor, whole| tensor, whole                    | partition, the rank's part         |
| stale_grad               | not held     | not held                         | subgroup, the rank's parts in order|
| host_grad                | not held     | group, the rank's part of it     | subgroup, the rank's parts in order|

A moment that needs whole tensors is first cut like a master; in stages 1 and 2 `OverlappingSharding` then widens it.

The tensors of a flat group lie end to end in registration order. `round_robin_gradients` reorders them: first the
tensors numbered 0, data, 2 data, ..., then 1, data + 1, ... With `parameter_alignment` each tensor begins at a multiple
of `weight_alignment`. Both ignore empty tensors. A layout's `order` replaces the round-robin one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.interval import Ints, chains, join
from ds_dynatrain.space.kind import Kind, kind_of, row_of
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.sharding import EvenSharding, OverlappingSharding, Sharding
from ds_dynatrain.space.tensor import FROZEN, BufferId, CoordinateLine, LogicalTensor, Pieces, split_by_tensor


@dataclass(frozen=True)
class ZeroRules:
    """The settings of a DeepSpeed configuration that determine how ZeRO partitions tensors. Sizes are in elements.

    alignment_factor: in stages 1 and 2 a flat group is padded to a multiple of alignment_factor x data.
    round_robin_stages: which of stages 1 and 2 order the tensors of a flat group round-robin over the ranks.
    aligned_stages: which of stages 1 and 2 begin each tensor of a flat group at a multiple of weight_alignment.
    weight_alignment: the alignment of tensors in the `aligned_stages`.
    ordered_stages: which of stages 1 and 2 can have a custom order of tensors (`Layout.order`).
    flat_without_zero: whether stage 0 has flat groups, whole and without padding (DeepSpeed's FP16_Optimizer).
    parts_without_zero: whether stage 0 is partitioned like stage 1 (BF16_Optimizer, which DeepSpeed uses for pipelines
        at stage 0).
    sub_group_size: a ZeRO-3 sub-group is closed when the sum of its parts on a rank reaches this size.
    """

    alignment_factor: int = 2
    round_robin_stages: frozenset[int] = frozenset()
    aligned_stages: frozenset[int] = frozenset()
    weight_alignment: int = 1
    ordered_stages: frozenset[int] = frozenset({1, 2})
    flat_without_zero: bool = False
    parts_without_zero: bool = False
    sub_group_size: int = 10**9


def as_cut(rules: ZeroRules, layout: Layout) -> Layout:
    """Return the layout with its effective ZeRO stage: stage 0 becomes 1 if it is partitioned like stage 1."""
    return layout.replace(zero_stage=1) if rules.parts_without_zero and layout.zero_stage == 0 else layout


def has_flat_groups(rules: ZeroRules, layout: Layout) -> bool:
    """Return whether the layout stores the tensors of an optimizer group end to end in one buffer."""
    return layout.zero_stage in (1, 2) or (layout.zero_stage == 0 and rules.flat_without_zero)


Table = tuple[BufferId, ...]


def buffer_table(line: CoordinateLine, rules: ZeroRules, layout: Layout) -> Table:
    """Return all buffers of a layout, in the order in which its shardings number them.

    Buffers of single tensors come first, then shared buffers. `buffers_of` returns those that a rank has, with sizes.
    """
    tensors, count = len(line.tensors), line.trainable_count
    if layout.zero_stage == 3:
        return _numbered(("partition", tensors), ("subgroup", subgroup_count(line, rules, layout)))
    if has_flat_groups(rules, layout):
        return _numbered(("tensor", tensors), ("group", int(line.groups[:count].max(initial=-1)) + 1))
    return _numbered(("tensor", tensors))


@lru_cache(maxsize=32)
def _numbered(*sorts: tuple[str, int]) -> Table:
    """Return buffers numbered 0 to count - 1 for each (place, count).

    The result is cached, so that many shard groups share one object.
    """
    found = list[BufferId]()
    for place, count in sorts:
        found += map(BufferId, itertools.repeat(place, count), range(count))
    return tuple(found)


def sharding(line: CoordinateLine, rules: ZeroRules, layout: Layout, kind: Kind, experts: bool = False) -> Sharding:
    """Return how ZeRO partitions one state kind of the local tensors.

    experts: whether to partition the expert tensors (over the ranks that hold the same expert) or all other tensors.
    """
    table = buffer_table(line, rules, layout)
    count = len(line.tensors) if layout.zero_stage in row_of(kind.name).stages else 0
    if not row_of(kind.name).of_frozen:
        count = min(count, line.trainable_count)
    ranks = group_size(layout, experts)
    if has_flat_groups(rules, layout):
        cut = _flat_groups(line, rules, layout, kind.name, count, table, ranks)
    elif layout.zero_stage == 3:
        cut = _parts(line, rules, layout, count, table, ranks)
    else:
        cut = _whole(line, count, table, ranks)
    filled = cut.start < cut.stop
    if line.experts.any():
        filled &= line.experts[np.searchsorted(line.bases[:-1], cut.start, side="right") - 1] == experts
    if kind.groups is not None:
        filled &= np.isin(line.groups_at(cut.start), sorted(kind.groups))
    cut = cut.only(filled)
    return OverlappingSharding.of(line, cut) if kind.overlaps(layout) else cut


def group_size(layout: Layout, experts: bool = False) -> int:
    """Return the number of ranks over which ZeRO partitions a tensor.

    This is data x sequence or, for an expert's tensor, the number of ranks of a stage that hold the same expert.
    """
    return layout.ranks_per_stage // layout.expert if experts else layout.data * layout.sequence


def group_sizes(line: CoordinateLine, layout: Layout) -> Ints:
    """Return, for each tensor, the number of ranks over which ZeRO partitions it."""
    return np.where(line.experts, group_size(layout, experts=True), group_size(layout))


def subgroups(line: CoordinateLine, rules: ZeroRules, layout: Layout) -> Ints:
    """Return the index of the ZeRO-3 sub-group of each trainable tensor.

    An optimizer group that fits into sub_group_size is one sub-group. Otherwise a sub-group ends with the tensor whose
    part brings the sum to sub_group_size.
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


def subgroup_count(line: CoordinateLine, rules: ZeroRules, layout: Layout) -> int:
    """Return the number of ZeRO-3 sub-groups of the local tensors."""
    return int(subgroups(line, rules, layout).max(initial=-1)) + 1


def flat_order(line: CoordinateLine, rules: ZeroRules, layout: Layout, group: int) -> tuple[Ints, Ints, int]:
    """Return the order of tensors in a flat group: (tensor numbers, position of each tensor, elements before the final
    padding).

    Empty tensors are left out; DeepSpeed also drops them before it numbers tensors.
    """
    tensors = np.flatnonzero((line.groups == group) & (line.numels > 0))
    if layout.order is not None:
        tensors = tensors[np.argsort(places_of(layout.order, line.trainable_count)[tensors])]
    elif layout.zero_stage in rules.round_robin_stages:
        ranks = group_size(layout, bool(line.experts[tensors[:1]].any()))
        tensors = tensors[np.argsort(np.arange(len(tensors)) % ranks, kind="stable")]
    step = rules.weight_alignment if layout.zero_stage in rules.aligned_stages else 1
    numels = line.numels[tensors]
    room = -(-numels // step) * step
    position = np.cumsum(room) - room
    return tensors, position, int(position[-1] + numels[-1]) if len(tensors) else 0


@lru_cache(maxsize=8)
def places_of(order: tuple[int, ...], count: int) -> Ints:
    """Return the position of each of `count` trainable tensors in the order of tensors of a layout.

    Raises LayoutError if the order has another number of tensors.
    """
    numbers = np.concatenate([np.arange(*run) for run in zip(order[::2], order[1::2], strict=True)])
    if len(numbers) != count:
        raise LayoutError(
            f"the layout orders {len(numbers)} tensors, and {count} are trained; drop the order: replace(order=None)"
        )
    return np.argsort(numbers)


def partition_size(line: CoordinateLine, rules: ZeroRules, layout: Layout, group: int) -> int:
    """Return the number of elements in a rank's part of a flat group, padding included.

    Under stage 0 this is the size of the whole group.
    """
    tensors, _, numel = flat_order(line, rules, layout, group)
    if layout.zero_stage == 0:
        return numel
    ranks = group_size(layout, bool(line.experts[tensors[:1]].any()))
    step = rules.alignment_factor * ranks
    return -(-numel // step) * step // ranks


def _whole(line: CoordinateLine, count: int, table: Table, ranks: int) -> EvenSharding:
    numbers, bases = np.arange(count, dtype=np.int64), line.bases
    nothing = np.zeros_like(numbers)
    return EvenSharding(
        bases[:count], bases[1 : count + 1], line.numels[:count], numbers, nothing, nothing, table, ranks, True
    )


def _flat_groups(
    line: CoordinateLine, rules: ZeroRules, layout: Layout, kind: str, count: int, table: Table, ranks: int
) -> EvenSharding:
    """Return the sharding of flat groups for stages 0 to 2. Each frozen tensor is a segment of its own.

    A flat group has several segments if its order of tensors differs from that of the coordinate line.
    """
    replicated = layout.zero_stage in row_of(kind).whole_in
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
    first, last = chains(joined, len(filled))
    start, stop = line.bases[filled[first]], line.bases[filled[last] + 1]
    nothing = np.zeros_like(first)
    return EvenSharding(
        start,
        stop,
        stop - start if replicated else width[filled[first]],
        buffer[first],
        position[first] if replicated else nothing,
        nothing if replicated else position[first],
        table,
        ranks,
        replicated,
    )


def _parts(
    line: CoordinateLine, rules: ZeroRules, layout: Layout, count: int, table: Table, ranks: int
) -> EvenSharding:
    """Return the sharding of ZeRO-3, with one segment per tensor.

    The parts of a sub-group's tensors share one buffer; the part of a frozen tensor has its own.
    """
    trainable = min(count, line.trainable_count)
    width = -(-line.numels // group_sizes(line, layout))[:count]
    number = subgroups(line, rules, layout)[:trainable]
    before = np.cumsum(width[:trainable]) - width[:trainable]
    opens = np.append(True, np.diff(number) > 0)[:trainable]
    at = np.zeros(count, np.int64)
    at[:trainable] = before - np.maximum.accumulate(np.where(opens, before, 0))
    buffer = np.arange(count, dtype=np.int64)
    buffer[:trainable] = number + len(line.tensors)
    bases = line.bases
    return EvenSharding(bases[:count], bases[1 : count + 1], width, buffer, at, np.zeros_like(at), table, ranks, False)


class Buffer(NamedTuple):
    """A buffer of a rank, and the optimizer group of its tensors (FROZEN for a buffer of weights only).

    numel: elements in the buffer of one rank, padding included.
    whole: elements that the buffer would have if the rank held the parts of all ranks.
    """

    name: BufferId
    group: int
    numel: int
    whole: int


def buffers_of(line: CoordinateLine, rules: ZeroRules, layout: Layout) -> list[Buffer]:
    """Return the buffers that a rank has under a layout: buffers of single tensors first, then shared buffers."""
    trainable, together = line.trainable_count, list[Buffer]()
    parts = -(-line.numels // group_sizes(line, layout))
    if layout.zero_stage == 3:
        numbers = subgroups(line, rules, layout)
        group_of = dict(zip(numbers.tolist(), line.groups.tolist(), strict=False))
        for number, numel in enumerate(np.bincount(numbers, weights=parts[:trainable]).astype(np.int64).tolist()):
            together.append(Buffer(BufferId("subgroup", number), group_of[number], numel, numel))
    elif has_flat_groups(rules, layout):
        for group in np.unique(line.groups[:trainable]).tolist():
            numel = partition_size(line, rules, layout, group)
            ranks = int(group_sizes(line, layout)[np.argmax(line.groups == group)]) if layout.zero_stage else 1
            together.append(Buffer(BufferId("group", group), group, numel, numel * ranks))
    place, numels = ("partition", parts) if layout.zero_stage == 3 else ("tensor", line.numels)
    alone = list[Buffer]()
    for number in range(trainable if together else 0, len(line.tensors)):
        alone.append(
            Buffer(BufferId(place, number), int(line.groups[number]), int(numels[number]), int(numels[number]))
        )
    return [*alone, *together]


@dataclass(frozen=True, eq=False)
class LocalSpace:
    """The state of one rank, on its own coordinate line, where each tensor has its local shape.

    layout: the layout of the whole world.
    zero_rank: index among the data x sequence ranks of the ZeRO group.
    expert_rank: index among the ranks of the stage that hold the same experts.
    """

    line: CoordinateLine
    rules: ZeroRules
    kinds: tuple[Kind, ...]
    layout: Layout
    zero_rank: int
    expert_rank: int = 0

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """The local tensors, numbered like the logical tensors."""
        return self.line.tensors

    def holding(self, kind: str) -> list[Pieces]:
        """Return the pieces of a state kind on this rank: those of dense tensors, then those of experts if any."""
        held = kind_of(self.kinds, kind)
        found = [sharding(self.line, self.rules, self.layout, held).holding(self.zero_rank)]
        if self.line.experts.any():
            found.append(sharding(self.line, self.rules, self.layout, held, experts=True).holding(self.expert_rank))
        return found

    def sizes(self) -> dict[tuple[str, BufferId], int]:
        """Return a map from (kind, buffer) to the number of elements in that buffer of this rank, including padding."""
        found: dict[tuple[str, BufferId], int] = {}
        buffers = buffers_of(self.line, self.rules, self.layout)
        for kind in self.kinds:
            if self.layout.zero_stage not in row_of(kind.name).stages:
                continue
            if kind.overlaps(self.layout):
                for pieces in self.holding(kind.name):  # whole tensors only; a buffer without a piece is left out
                    for piece in pieces:
                        key = kind.name, piece.buffer
                        found[key] = found.get(key, 0) + piece.stop - piece.start
                continue
            is_whole = self.layout.zero_stage in row_of(kind.name).whole_in
            for name, group, numel, whole in buffers:
                if row_of(kind.name).of_frozen or (group != FROZEN and kind.is_of(group)):
                    found[kind.name, name] = whole if is_whole else numel
        return found

    def rows(self, kind: str) -> tuple[Ints, Pieces]:
        """Return all pieces of a state kind on this rank, cut at tensor boundaries: (tensor numbers, pieces)."""
        columns = []
        for pieces in self.holding(kind):
            number, part = split_by_tensor(self.line.bases, pieces)
            columns.append((number, *part.columns))
        number, start, stop, buffer, offset = join(columns)
        return number, Pieces(start, stop, buffer, offset, part.buffers)
