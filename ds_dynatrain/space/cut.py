"""Cuts that compose: how an axis deals a tensor out, each on top of the one before.

A *shard* is a list of pieces: a piece is a box of the logical tensor and where its elements lie in the rank's local
buffer (`offset` and `strides`, in elements). A cut looks at the local tensor that the cuts before it have left and
keeps a part of it, so the cuts of several axes are applied one after another: `compose(shape, [(cut, index), ...])`.
ZeRO is none of them: it cuts the line of what they leave (`zero`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.box import Box, row_major


@dataclass(frozen=True)
class Placed:
    """A piece: the elements of `box` lie at offset + sum((index[d] - box.start[d]) * strides[d]) of a local buffer."""

    box: Box
    offset: int
    strides: tuple[int, ...]

    def restrict(self, box: Box) -> Placed | None:
        """The part of the piece inside of another box, or None."""
        common = self.box.intersect(box)
        if common is None:
            return None
        steps = zip(common.start, self.box.start, self.strides, strict=True)
        return Placed(common, self.offset + sum((here - first) * stride for here, first, stride in steps), self.strides)


@dataclass(frozen=True)
class Shard:
    """All pieces of a tensor on one rank. shape: of the local buffer; its elements that no piece covers are padding."""

    shape: tuple[int, ...]
    pieces: tuple[Placed, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        """A tensor that nothing has cut."""
        pieces = (Placed(Box.whole(shape), 0, row_major(shape)),) if math.prod(shape) else ()
        return cls(tuple(shape), pieces)

    @property
    def numel(self) -> int:
        """Number of elements of the tensor, without padding."""
        return sum(piece.box.numel for piece in self.pieces)


class Cut(Protocol):
    """A rule that deals the local tensor of a shape out to `count` ranks."""

    @property
    def count(self) -> int:
        """Number of ranks that the cut deals to."""

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """The local shape of rank `index`, and the pieces of the tensor of `shape` that lie in it."""


@dataclass(frozen=True)
class Pick:
    """The whole tensor on some ranks and nothing on the others (an expert that is not stacked with others)."""

    count: int
    holders: tuple[int, ...]

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """All or nothing."""
        _check_index(self, index)
        shard = Shard.whole(shape) if index in self.holders else Shard((0,), ())
        return shard.shape, shard.pieces


@dataclass(frozen=True)
class DimCut:
    """A dim cut in blocks, and each block in parts, one part of every block per rank.

    blocks: blocks[b][i] elements of block b go to rank i. Blocks follow one another along the dim. They may reach past
    the tensor's end, in the last block only: what is there is padding. Even and uneven cuts are one block; a fused
    query-key-value is three.
    """

    dim: int
    blocks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Raise LayoutError for blocks that deal to different numbers of ranks, or a negative size."""
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
        """Number of ranks."""
        return len(self.blocks[0])

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """One piece for each block with elements here; LayoutError if the blocks do not cover the dim."""
        _check_index(self, index)
        size = _dim(shape, self.dim)
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


def uneven(dim: int, sizes: Iterable[int]) -> DimCut:
    """A dim cut in parts of the sizes given, in rank order."""
    return DimCut(dim, (tuple(sizes),))


def compose(shape: tuple[int, ...], cuts: Iterable[tuple[Cut, int]]) -> Shard:
    """The shard of a tensor after several cuts, each with the rank's index in it, outermost axis first."""
    shard = Shard.whole(shape)
    for cut, index in cuts:
        local, kept = cut.parts(shard.shape, index)
        found = (_through(part, piece, shard.shape) for part in kept for piece in shard.pieces)
        shard = Shard(local, tuple(piece for piece in found if piece is not None))
    return shard


def _through(part: Placed, piece: Placed, buffer: tuple[int, ...]) -> Placed | None:
    """What a further cut keeps of a piece: `part` is a box of the buffer that the piece is a box of, too."""
    left, start = piece.offset, []
    for stride in row_major(buffer):
        index, left = divmod(left, stride)
        start.append(index)
    common = part.restrict(Box.whole(piece.box.shape).shift(tuple(start)))
    if common is None:
        return None
    by = tuple(first - index for first, index in zip(piece.box.start, start, strict=True))
    return Placed(common.box.shift(by), common.offset, common.strides)


def _dim(shape: tuple[int, ...], dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise LayoutError(f"a tensor of shape {shape} has no dim {dim}; give 0 to {len(shape) - 1}")
    return shape[dim]


def _check_index(cut: Cut, index: int) -> None:
    if not 0 <= index < cut.count:
        raise LayoutError(f"index {index} of a cut in {cut.count}; give 0 to {cut.count - 1}")
