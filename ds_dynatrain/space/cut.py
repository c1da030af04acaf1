"""How the pipe, expert and tensor axes partition logical tensors, before ZeRO partitions the resulting local tensors.

A `Box` is an axis-aligned block of a tensor, in any number of dims (none for a scalar). A *shard* is a list of pieces:
a piece is a box of the logical tensor and the position of its elements in the rank's local buffer (`offset` and
`strides`, in elements). Each cut keeps a part of the local tensor that results from earlier cuts, so the cuts of
several axes are applied one after another: `compose(shape, [(cut, index), ...])`. `AxisCuts` says how all axes of a
layout partition one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.tensor import LogicalTensor


@dataclass(frozen=True, order=True)
class Box:
    """The elements whose index lies in [start[d], stop[d]) in every dim d. A box without dims is one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise LayoutError if `start` and `stop` differ in length, or unless 0 <= start <= stop in every dim."""
        if len(self.start) != len(self.stop):
            raise LayoutError(
                f"a box has {len(self.start)} starts and {len(self.stop)} stops; give one of each for every dim"
            )
        if any(not 0 <= low <= high for low, high in zip(self.start, self.stop, strict=True)):
            raise LayoutError(f"box {self.start} to {self.stop}; give 0 <= start <= stop in every dim")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dim."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes, or None if there are none.

        Raises LayoutError if the boxes have different numbers of dims.
        """
        if len(self.start) != len(other.start):
            raise LayoutError(
                f"a box of {len(self.start)} dims meets one of {len(other.start)}; give boxes of one tensor"
            )
        low = tuple(map(max, self.start, other.start))
        high = tuple(map(min, self.stop, other.stop))
        return Box(low, high) if all(map(int.__lt__, low, high)) else None

    def contains(self, other: Box) -> bool:
        """Return whether every element of the other box is in this one."""
        return other.numel == 0 or self.intersect(other) == other

    def shift(self, by: tuple[int, ...]) -> Box:
        """Return the same block, moved by `by[d]` in every dim d."""
        low = tuple(a + b for a, b in zip(self.start, by, strict=True))
        return Box(low, tuple(a + b for a, b in zip(low, self.shape, strict=True)))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def runs_of_box(shape: tuple[int, ...], box: Box) -> tuple[Ints, Ints]:
    """Return the fewest row-major runs (starts, stops) that cover a box of a tensor of `shape`.

    Raises LayoutError if the box is not inside the tensor.
    """
    if not Box.whole(shape).contains(box):
        raise LayoutError(f"box {box.start} to {box.stop} is not in a tensor of shape {shape}; give a box inside of it")
    if not box.numel:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    strides = row_major(shape)
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = range(max(inner - 1, 0))
    length = math.prod(box.shape[len(outer) :])
    base = sum(low * stride for low, stride in zip(box.start, strides, strict=True))
    steps = [np.arange(box.shape[dim], dtype=np.int64) * strides[dim] for dim in outer]
    start = np.array([base + sum(step) for step in itertools.product(*steps)], dtype=np.int64)
    return interval.union(start, start + length)


@dataclass(frozen=True)
class Placed:
    """A piece of a tensor in a local buffer.

    The element of `box` at `index` lies at offset + sum((index[d] - box.start[d]) * strides[d]) of the buffer.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]

    def restrict(self, box: Box) -> Placed | None:
        """Return the part of the piece inside another box, or None if they do not overlap."""
        common = self.box.intersect(box)
        if common is None:
            return None
        steps = zip(common.start, self.box.start, self.strides, strict=True)
        return Placed(common, self.offset + sum((here - first) * stride for here, first, stride in steps), self.strides)


@dataclass(frozen=True)
class Shard:
    """The pieces of a tensor that lie on one rank.

    shape: the shape of the local buffer; elements of it that no piece covers are padding.
    """

    shape: tuple[int, ...]
    pieces: tuple[Placed, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        """Return the shard that holds a whole tensor."""
        pieces = (Placed(Box.whole(shape), 0, row_major(shape)),) if math.prod(shape) else ()
        return cls(tuple(shape), pieces)

    @property
    def numel(self) -> int:
        """Number of elements of the tensor in the shard, without padding."""
        return sum(piece.box.numel for piece in self.pieces)


@dataclass(frozen=True)
class Pick:
    """A cut that leaves the whole tensor on some ranks and nothing on the others; used for experts that are not
    stacked.

    count: number of ranks.
    holders: the ranks that hold the tensor.
    """

    count: int
    holders: tuple[int, ...]

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Return the local shape and the pieces: the whole tensor for a holder; otherwise shape (0,) and no piece."""
        _check_index(self, index)
        shard = Shard.whole(shape) if index in self.holders else Shard((0,), ())
        return shard.shape, shard.pieces


@dataclass(frozen=True)
class DimCut:
    """A cut of one dim into blocks, and of each block into one part per rank.

    blocks: rank i gets blocks[b][i] elements of block b. Blocks follow one another along the dim. Only the last block
    may reach past the tensor's end; the excess is padding. Even and uneven cuts have one block; a fused query-key-value
    tensor has three.
    """

    dim: int
    blocks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Raise LayoutError if the blocks have different numbers of parts, or if a size is negative."""
        if not self.blocks or len({len(block) for block in self.blocks}) != 1:
            raise LayoutError(
                f"the blocks {self.blocks} of dim {self.dim} do not deal to one number of ranks; give each block as "
                "many sizes"
            )
        if any(size < 0 for block in self.blocks for size in block):
            raise LayoutError(
                f"the blocks {self.blocks} of dim {self.dim} have a negative size; give sizes of 0 or more"
            )

    @property
    def count(self) -> int:
        return len(self.blocks[0])

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Return the local shape of rank `index`, and one piece for each block of which the rank holds elements.

        Raises LayoutError if the blocks do not cover the dim.
        """
        _check_index(self, index)
        if not 0 <= self.dim < len(shape):
            raise LayoutError(f"a tensor of shape {shape} has no dim {self.dim}; give 0 to {len(shape) - 1}")
        size = shape[self.dim]
        last = sum(map(sum, self.blocks[:-1]))
        if not last <= size <= last + sum(self.blocks[-1]):
            total = last + sum(self.blocks[-1])
            raise LayoutError(
                f"blocks {self.blocks}, together {total}, do not cover dim {self.dim} of {shape}; give sizes that add "
                f"up to {size}"
            )
        local = (*shape[: self.dim], sum(block[index] for block in self.blocks), *shape[self.dim + 1 :])
        strides, pieces, base, here = row_major(local), [], 0, 0
        for block in self.blocks:
            low = base + sum(block[:index])
            rows = max(min(block[index], size - low), 0)
            part = Box.whole((*shape[: self.dim], rows, *shape[self.dim + 1 :]))
            if part.numel:
                by = tuple(low if dim == self.dim else 0 for dim in range(len(shape)))
                pieces.append(Placed(part.shift(by), here * strides[self.dim], strides))
            base, here = base + sum(block), here + block[index]
        return local, tuple(pieces)


@dataclass(frozen=True)
class Dealt:
    """A cut of dim 0 into single rows, which are dealt in any order; used for stacks of experts.

    rows: the rows of each rank, in the order in which they lie there. Each row has one rank.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.rows)

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Return the local shape of rank `index`, and one piece for each run of neighboring rows.

        Raises LayoutError if the rows are not those of the tensor, each once.
        """
        _check_index(self, index)
        if sorted(itertools.chain(*self.rows)) != list(range(shape[0] if shape else 0)):
            raise LayoutError(
                f"rows {self.rows} are dealt of a tensor of shape {shape}; name each row of its dim 0 once"
            )
        mine, inner, pieces, here = self.rows[index], shape[1:], [], 0
        local = (len(mine), *inner)
        strides = row_major(local)
        for _, run in itertools.groupby(enumerate(mine), lambda pair: pair[1] - pair[0]):
            first, count = mine[here], len(list(run))
            box = Box((first, *(0,) * len(inner)), (first + count, *inner))
            if box.numel:
                pieces.append(Placed(box, here * strides[0], strides))
            here += count
        return local, tuple(pieces)


Cut = Pick | DimCut | Dealt
"""A rule that partitions a tensor over `count` ranks.

Its method `parts` returns the local shape on a rank, and the pieces of the tensor that the rank holds."""


def uneven(dim: int, sizes: Iterable[int]) -> DimCut:
    """Return a cut of a dim into parts of the given sizes, in rank order."""
    return DimCut(dim, (tuple(sizes),))


def compose(shape: tuple[int, ...], cuts: Iterable[tuple[Cut, int]]) -> Shard:
    """Return a rank's shard of a tensor after several cuts, outermost axis first.

    cuts: each cut with the rank's index in it.
    """
    shard = Shard.whole(shape)
    for cut, index in cuts:
        local, kept = cut.parts(shard.shape, index)
        found = (_through(part, piece, shard.shape) for part in kept for piece in shard.pieces)
        shard = Shard(local, tuple(piece for piece in found if piece is not None))
    return shard


def _through(part: Placed, piece: Placed, buffer: tuple[int, ...]) -> Placed | None:
    """Return the part of `piece` that a further cut keeps, or None if it keeps nothing.

    part: a piece that the cut keeps of `buffer`, the shape of the local tensor in which `piece` lies.
    """
    left, start = piece.offset, []
    for stride in row_major(buffer):
        index, left = divmod(left, stride)
        start.append(index)
    common = part.restrict(Box.whole(piece.box.shape).shift(tuple(start)))
    if common is None:
        return None
    by = tuple(first - index for first, index in zip(piece.box.start, start, strict=True))
    return Placed(common.box.shift(by), common.offset, common.strides)


def _check_index(cut: Cut, index: int) -> None:
    if not 0 <= index < cut.count:
        raise LayoutError(f"index {index} of a cut in {cut.count}; give 0 to {cut.count - 1}")


@dataclass(frozen=True)
class AxisCuts:
    """The cuts of one logical tensor under one layout.

    stages: the pipeline stages that hold the tensor, ascending; a tied weight has several.
    expert: how the expert axis cuts the tensor, or None if it belongs to no expert.
    tensor: how the tensor axis cuts it, or None if all ranks of that axis hold the same elements. This is None for an
    expert's tensor: all ranks with the same expert index hold the same elements, whatever their tensor index.
    """

    stages: tuple[int, ...] = (0,)
    expert: Cut | None = None
    tensor: Cut | None = None

    def shard(self, shape: tuple[int, ...], pipe: int, expert: int, tensor: int) -> Shard:
        """Return the shard of a tensor of `shape` at the given indexes; its shape is (0,) if the stage has no part."""
        if pipe not in self.stages:
            return NOTHING
        cuts = [(cut, index) for cut, index in ((self.expert, expert), (self.tensor, tensor)) if cut is not None]
        return compose(shape, cuts)


NOTHING = Shard((0,), ())
WHOLE = AxisCuts()

Partition = tuple[AxisCuts, ...]
"""One entry per logical tensor, in registration order."""
Partitioner = Callable[[Layout], Partition]


def is_partitioned(layout: Layout) -> bool:
    """Return whether ranks of the layout hold different parts of the model before ZeRO cuts anything."""
    return layout.pipe > 1 or layout.expert > 1 or layout.tensor > 1


def shared_stages(cuts: Iterable[AxisCuts]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of stages that share a tensor, sorted."""
    return tuple(sorted({each.stages for each in cuts if len(each.stages) > 1}))


def check_partition(partition: Partition, tensors: Iterable[LogicalTensor], layout: Layout) -> None:
    """Raise LayoutError, naming the tensor, if its cuts do not fit the axis sizes of the layout."""
    for tensor, cuts in zip(tensors, partition, strict=True):
        name = tensor.name
        if not cuts.stages or not all(0 <= stage < layout.pipe for stage in cuts.stages):
            raise LayoutError(
                f"{name!r} lies on stages {cuts.stages}, and {layout} has {layout.pipe}; give stages below "
                f"{layout.pipe}, or a larger pipe"
            )
        for axis in ("expert", "tensor"):
            cut, size = getattr(cuts, axis), getattr(layout, axis)
            if cut is not None and cut.count != size:
                raise LayoutError(
                    f"{name!r} is dealt out in {cut.count} by the {axis} axis, and {layout} has {size}; give "
                    f"{axis}={cut.count}"
                )
        if tensor.expert and cuts.tensor is not None and layout.tensor > 1:
            raise LayoutError(
                f"{name!r} belongs to experts and is cut by the tensor axis, too; {layout} has it whole: give tensor=1"
            )
