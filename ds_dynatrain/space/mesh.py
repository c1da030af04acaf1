"""The mesh of a layout with several axes: which elements of the logical tensors each rank's local tensors hold.

Ranks with the same indexes on the pipe and tensor axes form a ZeRO group and hold the same *local* tensors: their parts
of the logical tensors, with the same numbers; some are empty. ZeRO partitions these local tensors like any model
(`zero`). An *index map* gives the coordinate on the logical line for each element of such a local line. Expert tensors
are partitioned separately: ranks of a pipeline stage with the same expert index form their group, whatever their index
on the tensor axis.
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
    """A group of ranks over which ZeRO partitions the same local tensors.

    ranks: the ranks in group order.
    line: the local tensors of the first rank; it includes tensors that belong to other groups, and these may differ on
    other ranks.
    experts: whether the group holds expert tensors.
    index_map: the coordinates of this group's tensors, as pieces of a single buffer that stands for `line`.
    primary: the part of `index_map` that no earlier group holds.
    """

    ranks: Ints
    line: CoordinateLine
    experts: bool
    index_map: Pieces
    primary: Pieces


@dataclass(frozen=True, eq=False)
class Mesh:
    """The shard groups of a layout, and the coordinate line of each rank's local tensors. Built once per layout."""

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
        """Build the shard groups. Raises LayoutError if a cut does not fit the layout or a tensor."""
        check_partition(self.partition, self.line.tensors, self.layout)
        shard_groups: list[ShardGroup] = []
        nothing = np.empty(0, np.int64)
        taken = {False: (nothing, nothing), True: (nothing, nothing)}  # expert tensors are in groups of experts only
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

        The result is cached and safe to read from any thread.
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
        """Return a rank's shard of a logical tensor before ZeRO partitions it."""
        return self._shard(self.place(rank), tensor)

    def place(self, rank: int) -> Place:
        """Return the indexes of a rank on the pipe, expert and tensor axes."""
        at = self.layout.coordinate(rank)
        return at["pipe"], self.layout.expert_place(rank)[0], at["tensor"]

    def zero_rank(self, rank: int) -> int:
        """Return the index of a rank among the data x sequence ranks of its ZeRO group."""
        at = self.layout.coordinate(rank)
        return at["data"] * self.layout.sequence + at["sequence"]

    def _groups(self) -> list[tuple[Ints, bool]]:
        """Return (ranks, whether it holds expert tensors) for each shard group; groups of experts come last."""
        kinds = [(False, self.layout.tensor)]
        if self.line.experts.any():
            kinds.append((True, self.layout.expert))
        stages = np.arange(self.layout.world_size).reshape(self.layout.pipe, -1)
        return [(stage[first::step], experts) for experts, step in kinds for stage in stages for first in range(step)]

    @cached_property
    def _alike(self) -> list[int]:
        """A class number for each tensor, shared by tensors with the same shape and cuts. Large models have few
        classes.
        """
        known: dict[tuple[tuple[int, ...], AxisCuts], int] = {}
        pairs = zip(self.line.tensors, self.partition, strict=True)
        return [known.setdefault((tensor.shape, cuts), len(known)) for tensor, cuts in pairs]

    @cached_property
    def _firsts(self) -> list[int]:
        """The first tensor of each class in `_alike`."""
        firsts: list[int] = np.unique(self._alike, return_index=True)[1].tolist()
        return firsts

    def _key(self, place: Place, tensor: int) -> tuple[int, Place]:
        """Return a cache key for the shard of a tensor at a place. It contains everything that the shard depends on."""
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
        """Return the coordinate line of the local tensors at a place, with tensors numbered like the logical tensors.

        Tensors that are not held at the place are empty.
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
        """Return the coordinates of the dense or expert tensors at a place, as pieces of its local line."""
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
    """Return the runs of a piece that are contiguous in both tensor and buffer: (start, stop, offset), row-major."""
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
