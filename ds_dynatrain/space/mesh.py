"""A layout of several axes: where the elements of each rank's local tensors lie on the line of all logical tensors.

Ranks with one place on the pipe and tensor axes form a ZeRO group and hold the same *local* tensors: the parts of the
logical tensors that the axes leave them, under the same numbers, some of them empty. ZeRO cuts a line of these local
tensors as it would cut any model (`zero`). An *index map* gives, for every element of such a local line, its coordinate
on the line of logical tensors. Expert tensors are dealt separately: the ranks of a pipeline stage with one place on the
expert axis form their group, whatever their places on the tensor axis are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ds_dynatrain.space import interval
from ds_dynatrain.space.cut import AxisCuts, Box, Partition, Placed, Shard, check_partition, row_major
from ds_dynatrain.space.interval import Ints, join
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.tensor import CoordinateLine, LogicalTensor, Pieces

Place = tuple[int, int, int]
"""Indexes on the pipe, expert and tensor axes."""


@dataclass(frozen=True, eq=False)
class ShardGroup:
    """A group of ranks that ZeRO deals the same local tensors to.

    ranks: the ranks in their order in the group. line: the local tensors of the first rank; it also has the tensors
    that other groups share out, which may differ on the next rank. experts: whether the group holds experts' tensors.
    index_map: where the elements of this group's tensors lie on that line, which stands for the one buffer of these
    pieces. primary: the part of `index_map` that no earlier group holds.
    """

    ranks: Ints
    line: CoordinateLine
    experts: bool
    index_map: Pieces
    primary: Pieces


@dataclass(frozen=True, eq=False)
class Mesh:
    """The shard groups of a layout, and each rank's local line. Built once per layout."""

    line: CoordinateLine
    layout: Layout
    partition: Partition
    shard_groups: tuple[ShardGroup, ...] = field(init=False)
    _lines: dict[Place, CoordinateLine] = field(init=False, repr=False, default_factory=dict)
    _alike_lines: dict[tuple[tuple[int, ...], ...], CoordinateLine] = field(
        init=False, repr=False, default_factory=dict
    )
    _shards: dict[tuple[int, Place], Shard] = field(init=False, repr=False, default_factory=dict)
    _runs: dict[tuple[int, Place], list[tuple[Ints, Ints, Ints]]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Build the shard groups; LayoutError for cuts that do not fit the layout or a tensor."""
        check_partition(self.partition, self.line.tensors, self.layout)
        shard_groups: list[ShardGroup] = []
        nothing = np.empty(0, np.int64)
        taken = {False: (nothing, nothing), True: (nothing, nothing)}  # experts' tensors are only in groups of experts
        for ranks, experts in self._groups():
            place = self.place(int(ranks[0]))
            index_map = self._index_map(place, experts)
            start, stop = taken[experts]
            primary = index_map.subtract(start, stop)
            taken[experts] = interval.union(np.append(start, index_map.start), np.append(stop, index_map.stop))
            shard_groups.append(ShardGroup(ranks, self.local_line(place), experts, index_map, primary))
        object.__setattr__(self, "shard_groups", tuple(shard_groups))

    @cached_property
    def holders(self) -> tuple[Ints, Ints, Ints]:
        """(tensor, shard group, first shard group with the same part) for each part of a tensor that a group holds.

        Computed once; safe to read from any thread.
        """
        rows: list[tuple[int, int, int]] = []
        for number, tensor in enumerate(self.line.tensors):
            first: dict[tuple[Box, ...], int] = {}
            for index, shard_group in enumerate(self.shard_groups):
                boxes = tuple(piece.box for piece in self.shard(int(shard_group.ranks[0]), number).pieces)
                if shard_group.experts == tensor.expert and boxes:
                    rows.append((number, index, first.setdefault(boxes, index)))
        tensors, shard_groups, firsts = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return tensors, shard_groups, firsts

    def shard(self, rank: int, tensor: int) -> Shard:
        """Return the pieces of a logical tensor, and its local shape, on a rank before ZeRO cuts it."""
        return self._shard(self.place(rank), tensor)

    def place(self, rank: int) -> Place:
        """Return the indexes of a rank on the pipe, expert and tensor axes."""
        at = self.layout.coordinate(rank)
        return at["pipe"], self.layout.expert_place(rank)[0], at["tensor"]

    def zero_rank(self, rank: int) -> int:
        """Return the place of a rank among the data x sequence ranks that ZeRO deals to."""
        at = self.layout.coordinate(rank)
        return at["data"] * self.layout.sequence + at["sequence"]

    def _groups(self) -> list[tuple[Ints, bool]]:
        """Return (ranks, whether ZeRO deals them experts' tensors) for every shard group, groups of experts last."""
        kinds = [(False, self.layout.tensor)]
        if self.line.experts.any():
            kinds.append((True, self.layout.expert))
        stages = np.arange(self.layout.world_size).reshape(self.layout.pipe, -1)
        return [(stage[first::step], experts) for experts, step in kinds for stage in stages for first in range(step)]

    @cached_property
    def _alike(self) -> list[int]:
        """One number for all tensors of the same shape and cuts; large models have few of them."""
        known: dict[tuple[tuple[int, ...], AxisCuts], int] = {}
        pairs = zip(self.line.tensors, self.partition, strict=True)
        return [known.setdefault((tensor.shape, cuts), len(known)) for tensor, cuts in pairs]

    @cached_property
    def _firsts(self) -> list[int]:
        """The first tensor for each number in `_alike`."""
        firsts: list[int] = np.unique(self._alike, return_index=True)[1].tolist()
        return firsts

    def _key(self, place: Place, tensor: int) -> tuple[int, Place]:
        """Return everything that the shard of a tensor at a place depends on."""
        cuts, (pipe, expert, index) = self.partition[tensor], place
        return self._alike[tensor], (
            int(pipe in cuts.stages),
            0 if cuts.expert is None else expert,
            0 if cuts.tensor is None else index,
        )

    def _shard(self, place: Place, tensor: int) -> Shard:
        key = self._key(place, tensor)
        if key not in self._shards:
            self._shards[key] = self.partition[tensor].shard(self.line.tensors[tensor].shape, *place)
        return self._shards[key]

    def local_line(self, place: Place) -> CoordinateLine:
        """Return the line of the local tensors at a place, numbered as the logical ones; those held elsewhere are
        empty.
        """
        if place not in self._lines:
            shapes = tuple(self._shard(place, first).shape for first in self._firsts)
            if shapes not in self._alike_lines:
                pairs = zip(self.line.tensors, self._alike, strict=True)
                self._alike_lines[shapes] = CoordinateLine(
                    tuple(LogicalTensor(held.name, shapes[alike], held.group, held.expert) for held, alike in pairs)
                )
            self._lines[place] = self._alike_lines[shapes]
        return self._lines[place]

    def _index_map(self, place: Place, experts: bool) -> Pieces:
        """Return where the elements of a place's dense or expert tensors lie."""
        line, alike = self.local_line(place), np.array(self._alike)
        nothing = np.empty(0, np.int64)
        parts: list[tuple[Ints, Ints, Ints]] = [(nothing, nothing, nothing)]
        for one, first in enumerate(self._firsts):
            numbers = np.flatnonzero((alike == one) & (self.line.experts == experts))
            if not len(numbers):
                continue
            key, bases, local_bases = self._key(place, first), self.line.bases[numbers, None], line.bases[numbers, None]
            if key not in self._runs:
                shape = self.line.tensors[first].shape
                self._runs[key] = [_runs(piece, shape) for piece in self._shard(place, first).pieces]
            for start, stop, local in self._runs[key]:
                runs = start + bases, stop + bases, local + local_bases
                parts.append((runs[0].reshape(-1), runs[1].reshape(-1), runs[2].reshape(-1)))
        start, stop, local = join(parts)
        return Pieces(start, stop, np.zeros_like(start), local).tidy()


def _runs(piece: Placed, shape: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Return the runs of a piece that are unbroken in both tensor and buffer: (start, stop, offset), row-major."""
    whole, dense = row_major(shape), piece.box.shape
    length, outer = 1, len(dense)
    while outer and whole[outer - 1] == piece.strides[outer - 1] == length:
        outer -= 1
        length *= dense[outer]
    first = sum(index * step for index, step in zip(piece.box.start, whole, strict=True))
    start, local = np.array([first], dtype=np.int64), np.array([piece.offset], dtype=np.int64)
    for dim in range(outer):
        steps = np.arange(dense[dim], dtype=np.int64)
        start = (start[:, None] + steps * whole[dim]).reshape(-1)
        local = (local[:, None] + steps * piece.strides[dim]).reshape(-1)
    return start, start + length, local
