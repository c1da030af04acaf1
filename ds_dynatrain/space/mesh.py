"""The mesh of a layout with several axes: which elements of the logical tensors each rank's local tensors hold.

Ranks with the same indexes on the pipe and tensor axes form a ZeRO group and hold the same *local* tensors: their parts
of the logical tensors, under the same tensor numbers (a part may be empty). ZeRO partitions these local tensors like
those of any model (`zero`). For each coordinate that a group holds, an *index map* gives the position on the line of
its local tensors. Expert tensors are partitioned separately: the ranks of a pipeline stage with the same expert index
form a group, regardless of their index on the tensor axis.

A large layout has thousands of groups, and a rank deals with few of them. Everything about a group is therefore
computed on demand from the *forms* of tensors: tensors of one form have the same shape and are cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from ds_dynatrain.space import interval
from ds_dynatrain.space.cut import NOTHING, Cut, Partition, Shard, check_partition
from ds_dynatrain.space.interval import Ints, Runs
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.strips import Strips
from ds_dynatrain.space.tensor import CoordinateLine, LogicalTensor
from ds_dynatrain.space.tiling import Tiling, strips_of

Place = tuple[int, int, int]
"""Indexes on the pipe, expert and tensor axes."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ShardGroup:
    """A group of ranks over which ZeRO partitions the same local tensors.

    number: the index of the group in `Mesh.shard_groups`.
    ranks: the ranks in group order.
    place: the indexes of the first rank on the pipe, expert and tensor axes. Other ranks of the group may have other
        indexes; they then differ in the tensors that they hold as members of other groups.
    experts: whether the group holds expert tensors.
    """

    number: int
    ranks: Ints
    place: Place
    experts: bool


@dataclass(frozen=True, eq=False)
class Mesh:
    """The shard groups of a layout, and the coordinate line of each rank's local tensors. Built once per layout.

    tiling: how the elements of tensors are numbered; None for row-major order.
    """

    line: CoordinateLine
    layout: Layout
    partition: Partition
    tiling: Tiling | None = None
    _lines: dict[object, CoordinateLine] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raise LayoutError if a cut does not fit the layout or a tensor."""
        check_partition(self.partition, self.line.tensors, self.layout)
        for tensor in self._firsts:
            self.shards(tensor)

    @cached_property
    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """The shard groups; groups of experts come last."""
        stages, found = np.arange(self.layout.world_size).reshape(self.layout.pipe, -1), list[ShardGroup]()
        for experts in self.regions:
            for stage in stages:
                for first in range(self.per_stage(experts)):
                    ranks = stage[first :: self.per_stage(experts)]
                    found.append(ShardGroup(len(found), ranks, self.place(int(ranks[0])), experts))
        return tuple(found)

    @cached_property
    def regions(self) -> dict[bool, Runs]:
        """The coordinates of expert tensors (key True, if there are any) and of all other tensors (key False)."""
        experts, bases = self.line.experts, self.line.bases
        found = {False: interval.union(bases[:-1][~experts], bases[1:][~experts])}
        return found | ({True: interval.union(bases[:-1][experts], bases[1:][experts])} if experts.any() else {})

    def per_stage(self, experts: bool) -> int:
        """Return the number of shard groups per pipeline stage.

        experts: whether to count the groups of expert tensors instead of those of other tensors.
        """
        return self.layout.expert if experts else self.layout.tensor

    def groups_of(self, rank: Ints | int, experts: bool) -> tuple[Ints, Ints]:
        """Return (number of a rank's shard group, the rank's index in it), as arrays if `rank` is an array.

        experts: whether to return the groups of expert tensors instead of those of other tensors.
        """
        stage, place = np.divmod(rank, self.layout.ranks_per_stage)
        index, first = np.divmod(place, self.per_stage(experts))
        return self._before(experts) + stage * self.per_stage(experts) + first, index

    def _before(self, experts: bool) -> int:
        return self.layout.pipe * self.layout.tensor if experts else 0

    @cached_property
    def holders(self) -> tuple[Ints, Ints, Ints]:
        """Parts of tensors that shard groups hold, as arrays (tensor, group, first group with the same part).

        The result is cached and safe to read from any thread.
        """
        rows: list[tuple[int, int, int]] = []
        for number, (tensor, cuts, form) in enumerate(zip(self.line.tensors, self.partition, self.forms, strict=True)):
            first, width = self._first_alike[form], self.per_stage(tensor.expert)
            for stage in cuts.stages:
                for index in np.flatnonzero(first >= 0).tolist():
                    begin = self._before(tensor.expert) + index
                    owner = self._before(tensor.expert) + cuts.stages[0] * width + int(first[index])
                    rows.append((number, begin + stage * width, owner))
        tensors, shard_groups, firsts = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return tensors, shard_groups, firsts

    def shard(self, rank: int, tensor: int) -> Shard:
        """Return a rank's shard of a logical tensor before ZeRO partitions it."""
        pipe, *indexes = self.place(rank)
        return self._shard(tensor, *indexes) if pipe in self.partition[tensor].stages else NOTHING

    def shards(self, tensor: int) -> list[Shard]:
        """Return all shards of a tensor on a stage that holds it: one per pair of expert index and tensor index."""
        cuts = self.partition[tensor]
        experts, tensors = (1 if cut is None else cut.count for cut in (cuts.expert, cuts.tensor))
        return [self._shard(tensor, expert, index) for expert in range(experts) for index in range(tensors)]

    def place(self, rank: int) -> Place:
        """Return the indexes of a rank on the pipe, expert and tensor axes."""
        at = self.layout.coordinate(rank)
        return at["pipe"], self.layout.expert_place(rank)[0], at["tensor"]

    def zero_rank(self, rank: int) -> int:
        """Return the index of a rank among the data x sequence ranks of its ZeRO group."""
        at = self.layout.coordinate(rank)
        return at["data"] * self.layout.sequence + at["sequence"]

    # ---- forms -------------------------------------------------------------------------------------------------------

    @cached_property
    def forms(self) -> tuple[int, ...]:
        """A number for each tensor. Tensors with the same number have the same shape and are cut alike, regardless of
        their stages. Large models have few forms.
        """
        if self.tiling is not None:
            return self.tiling.forms
        known: dict[tuple[tuple[int, ...], bool, Cut | None, Cut | None], int] = {}
        pairs = zip(self.line.tensors, self.partition, strict=True)
        keys = ((each.shape, each.expert, cuts.expert, cuts.tensor) for each, cuts in pairs)
        return tuple(known.setdefault(key, len(known)) for key in keys)

    @cached_property
    def _form(self) -> Ints:
        return interval.ints(self.forms)

    @cached_property
    def _firsts(self) -> list[int]:
        """The first tensor of each form (tensors of one form have the same shape and are cut alike)."""
        firsts: list[int] = np.unique(self._form, return_index=True)[1].tolist()
        return firsts

    @cached_property
    def _is_on(self) -> Bools:
        """Whether each stage (row) holds each tensor (column)."""
        found = np.zeros((self.layout.pipe, len(self.partition)), dtype=bool)
        for number, cuts in enumerate(self.partition):
            found[list(cuts.stages), number] = True
        return found

    @cached_property
    def _is_first_on(self) -> Bools:
        """Whether each stage (row) is the first that holds each tensor (column)."""
        found: Bools = self._is_on & (np.cumsum(self._is_on, axis=0) == 1)
        return found

    @cached_property
    def _first_alike(self) -> list[Ints]:
        """First group of a stage that holds the same part, for each form of tensors and each shard group of the stage.

        The entry is -1 if the group holds nothing. Two parts of a tensor are either the same or disjoint.
        """
        found = list[Ints]()
        for tensor in self._firsts:
            known: dict[object, int] = {}
            first = np.full(self.per_stage(self.line.tensors[tensor].expert), -1, dtype=np.int64)
            for index in range(len(first)):
                boxes = tuple(piece.box for piece in self._shard(tensor, *self._indexes(index)).pieces)
                first[index] = known.setdefault(boxes, index) if boxes else -1
            found.append(first)
        return found

    def _indexes(self, index: int) -> tuple[int, int]:
        """Return (expert index, tensor index) of the shard groups that are number `index` within their stages."""
        return index % self.layout.expert, index % self.layout.tensor

    def _key(self, tensor: int, expert: int, index: int) -> tuple[int, int, int]:
        """Return a cache key for the shard of a tensor on its stages; it contains all that the shard depends on."""
        cuts = self.partition[tensor]
        return self.forms[tensor], 0 if cuts.expert is None else expert, 0 if cuts.tensor is None else index

    def _shard(self, tensor: int, expert: int, index: int) -> Shard:
        return self._shard_at(*self._key(tensor, expert, index))

    @cached_property
    def _shard_at(self) -> Callable[[int, int, int], Shard]:
        """A cached function that returns the shard for a key of `_key`."""

        @cache
        def shard(form: int, expert: int, index: int) -> Shard:
            tensor = self._firsts[form]
            return self.partition[tensor].shard(self.line.tensors[tensor].shape, expert, index)

        return shard

    @cached_property
    def _strips_at(self) -> Callable[[int, int, int], Strips]:
        """A cached function that returns the strips of the shard for a key of `_key`.

        Strips are relative to the tensor's first coordinate and to its first local address.
        """

        @cache
        def strips(form: int, expert: int, index: int) -> Strips:
            split = None if self.tiling is None else self.tiling.tiles[form]
            return strips_of(self._shard_at(form, expert, index), self.line.tensors[self._firsts[form]].shape, split)

        return strips

    # ---- shard groups ------------------------------------------------------------------------------------------------

    def local_line(self, place: Place) -> CoordinateLine:
        """Return the coordinate line of the local tensors at the given indexes on the pipe, expert and tensor axes.

        Tensors have the numbers of the logical tensors. Those that are not held there are empty.
        """
        pipe, *indexes = place
        shapes = tuple(self._shard(first, *indexes).shape for first in self._firsts)
        key = pipe, shapes
        if key not in self._lines:
            tensors = list[LogicalTensor]()
            for held, form, is_here in zip(self.line.tensors, self.forms, self._is_on[pipe].tolist(), strict=True):
                shape = shapes[form] if is_here else NOTHING.shape
                tensors.append(LogicalTensor(held.name, shape, held.group, held.expert))
            self._lines[key] = CoordinateLine(tuple(tensors))
        return self._lines[key]

    @cached_property
    def index_map(self) -> Callable[[ShardGroup, bool], Strips]:
        """A cached function (shard group, is_primary) -> where the group's coordinates lie on its local line.

        is_primary: whether to leave out coordinates that an earlier group also holds.
        """
        return cache(self._index_map)

    def _index_map(self, group: ShardGroup, is_primary: bool) -> Strips:
        line, parts, (pipe, *indexes) = self.local_line(group.place), list[Strips](), group.place
        is_here = (self._is_first_on if is_primary else self._is_on)[pipe] & (self.line.experts == group.experts)
        at = (group.number - self._before(group.experts)) % self.per_stage(group.experts)
        for form, first in enumerate(self._firsts):
            numbers = np.flatnonzero(is_here & (self._form == form))
            if len(numbers) and not (is_primary and self._first_alike[form][at] != at):
                strips = self._strips_at(*self._key(first, *indexes))
                parts.append(strips.repeat(self.line.bases[numbers], line.bases[numbers]))
        return Strips.join(parts)

    def groups_with(self, start: Ints, stop: Ints, is_primary: bool) -> Iterator[ShardGroup]:
        """Yield the shard groups that may hold some of the given coordinates, in order. A few of them may hold none.

        start, stop: the coordinates, as half-open ranges.
        is_primary: whether to leave out groups whose elements are all held by earlier groups.
        """
        filled = np.flatnonzero(self.line.numels)
        _, tensor, low, high = interval.intersect(start, stop, self.line.bases[filled], self.line.bases[filled + 1])
        tensor = filled[tensor]
        low, high, form = low - self.line.bases[tensor], high - self.line.bases[tensor], self._form[tensor]
        is_on, numbers = self._is_first_on if is_primary else self._is_on, set[int]()
        for number in np.unique(form).tolist():
            mine = np.flatnonzero(form == number)
            first, last = self._spans(number, is_primary)
            meets = (low[mine, None] < last) & (high[mine, None] > first)
            stage, index = np.nonzero(is_on[:, tensor[mine]].astype(np.float32) @ meets.astype(np.float32))
            experts = bool(self.line.experts[tensor[mine[0]]])
            numbers.update((self._before(experts) + stage * self.per_stage(experts) + index).tolist())
        return map(self.shard_groups.__getitem__, sorted(numbers))

    def _spans(self, form: int, is_primary: bool) -> tuple[Ints, Ints]:
        """Return (first coordinate, end) of the part of a form's tensors that each shard group of a stage holds.

        The range is empty for groups that hold nothing and, if `is_primary`, for parts that an earlier group holds.
        """
        firsts, tensor = self._first_alike[form], self._firsts[form]
        low, high = np.zeros_like(firsts), np.zeros_like(firsts)
        for index, first in enumerate(firsts.tolist()):
            if first == index or (first >= 0 and not is_primary):
                strips = self._strips_at(*self._key(tensor, *self._indexes(index)))
                low[index], high[index] = strips.start[0], strips.stop[-1]
        return low, high
