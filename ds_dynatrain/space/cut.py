"""How the pipe, expert and tensor axes partition logical tensors, before ZeRO partitions the resulting local tensors.

A `Box` is an axis-aligned block of a tensor, in any number of dims (none for a scalar). A *shard* is a list of pieces:
a piece is a box of the logical tensor and the position of its elements in the rank's local buffer (`offset` and
`strides`, in elements). A *cut* assigns the parts of a tensor to the ranks of one axis. `AxisCuts` says how the axes of
a layout partition one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.tensor import LogicalTensor


@dataclass(frozen=True)
class Box:
    """The elements whose index lies in [start[d], stop[d]) in every dim d. A box without dims is one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the box in every dim."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def contains(self, other: Box) -> bool:
        """Return whether this box contains the box `other`, which must not be empty."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Placed:
    """A block of a tensor (`box`), and its position in a local buffer.

    The element of `box` at `index` lies at offset + sum((index[d] - box.start[d]) * strides[d]) of the buffer.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]


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

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, size: int, runs: Iterable[tuple[int, int, int]]) -> Shard:
        """Return a shard that consists of slices of a tensor along one dim.

        shape: the shape of the tensor.
        size: the length of the shard in this dim.
        runs: for each slice, (first index, end index) in the tensor and the first index in the shard.
        """
        local = (*shape[:dim], size, *shape[dim + 1 :])
        strides, pieces, before = row_major(local), list[Placed](), (0,) * dim
        for low, high, here in runs:
            box = Box((*before, low, *(0,) * (len(shape) - dim - 1)), (*shape[:dim], high, *shape[dim + 1 :]))
            if low < high and box.numel:
                pieces.append(Placed(box, here * strides[dim], strides))
        return cls(local, tuple(pieces))

    @property
    def numel(self) -> int:
        """Number of elements of the tensor in the shard, without padding."""
        return sum(piece.box.numel for piece in self.pieces)


@dataclass(frozen=True)
class Pick:
    """A cut that leaves the whole tensor on some ranks and nothing on others. Used for experts that are not stacked.

    count: number of ranks.
    holders: the ranks that hold the tensor.
    """

    count: int
    holders: tuple[int, ...]

    def shard(self, shape: tuple[int, ...], index: int) -> Shard:
        """Return the shard of rank `index`. If the rank does not hold the tensor, the shard has the shape (0,)."""
        return Shard.whole(shape) if index in self.holders else NOTHING


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
        sizes = list(itertools.chain(*self.blocks))
        if len({*map(len, self.blocks)}) != 1 or min(sizes, default=0) < 0:
            raise LayoutError(
                f"the blocks {self.blocks} of dim {self.dim} do not deal to one number of ranks; give each block as "
                "many sizes, of 0 or more"
            )

    @property
    def count(self) -> int:
        return len(self.blocks[0])

    def shard(self, shape: tuple[int, ...], index: int) -> Shard:
        """Return the shard of rank `index`, with one piece per block in which the rank holds elements.

        Raises LayoutError if the blocks do not cover the dim.
        """
        if not 0 <= self.dim < len(shape):
            raise LayoutError(f"a tensor of shape {shape} has no dim {self.dim}; give 0 to {len(shape) - 1}")
        size, ends = shape[self.dim], list(itertools.accumulate(map(sum, self.blocks), initial=0))
        if not ends[-2] <= size <= ends[-1]:
            raise LayoutError(
                f"blocks {self.blocks}, together {ends[-1]}, do not cover dim {self.dim} of {shape}; give sizes that "
                f"add up to {size}"
            )
        runs, here = list[tuple[int, int, int]](), 0
        for base, block in zip(ends, self.blocks, strict=False):
            low = base + sum(block[:index])
            runs.append((low, min(low + block[index], size), here))
            here += block[index]
        return Shard.along(shape, self.dim, here, runs)


@dataclass(frozen=True)
class Dealt:
    """A cut of dim 0 into single rows, which are assigned to ranks in any order. Used for stacks of experts.

    rows: the rows of each rank, in the order in which the rank stores them. Each row belongs to one rank.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.rows)

    def shard(self, shape: tuple[int, ...], index: int) -> Shard:
        """Return the shard of rank `index`, with a piece for each run of neighboring rows.

        Raises LayoutError unless each row of the tensor is assigned to exactly one rank.
        """
        if not shape or sorted(itertools.chain(*self.rows)) != list(range(shape[0])):
            raise LayoutError(
                f"rows {self.rows} are dealt of a tensor of shape {shape}; name each row of its dim 0 once"
            )
        runs = list[tuple[int, int, int]]()
        for _, run in itertools.groupby(enumerate(self.rows[index]), lambda pair: pair[1] - pair[0]):
            (here, first), *others = run
            runs.append((first, first + 1 + len(others), here))
        return Shard.along(shape, 0, len(self.rows[index]), runs)


Cut = Pick | DimCut | Dealt
"""A rule that partitions a tensor over `count` ranks. Its method `shard` returns what a rank holds."""


def uneven(dim: int, sizes: Iterable[int]) -> DimCut:
    """Return a cut of a dim into parts of the given sizes, in rank order."""
    return DimCut(dim, (tuple(sizes),))


@dataclass(frozen=True)
class AxisCuts:
    """The cuts of one logical tensor under one layout.

    stages: the pipeline stages that hold the tensor, ascending; a tied weight has several.
    expert: how the expert axis cuts the tensor, or None if it belongs to no expert.
    tensor: how the tensor axis cuts it, or None if all ranks of that axis hold the same elements. It is None for an
        expert's tensor, because all ranks with the same expert index hold the same elements of it.
    """

    stages: tuple[int, ...] = (0,)
    expert: Cut | None = None
    tensor: Cut | None = None

    def shard(self, shape: tuple[int, ...], expert: int, tensor: int) -> Shard:
        """Return the shard of a tensor of `shape` for the given indexes on the expert and tensor axes.

        The stage must be one that holds the tensor.
        """
        if self.expert is not None:
            return self.expert.shard(shape, expert)
        return Shard.whole(shape) if self.tensor is None else self.tensor.shard(shape, tensor)


NOTHING = Shard((0,), ())
WHOLE = AxisCuts()

Partition = tuple[AxisCuts, ...]
"""The cuts of all logical tensors under a layout, in the order in which the tensors are registered."""
Partitioner = Callable[[Layout], Partition]


def is_partitioned(layout: Layout) -> bool:
    """Return whether the pipe, expert or tensor axes of a layout partition the model before ZeRO does."""
    return layout.pipe > 1 or layout.expert > 1 or layout.tensor > 1


def shared_stages(cuts: Iterable[AxisCuts]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of pipeline stages that share a tensor (a tied weight), sorted."""
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
        if cuts.tensor is not None and (cuts.expert is not None or (tensor.expert and layout.tensor > 1)):
            raise LayoutError(
                f"{name!r} belongs to experts and is cut by the tensor axis, too; {layout} has it whole: give tensor=1"
            )
