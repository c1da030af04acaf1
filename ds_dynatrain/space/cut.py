"""Cuts that compose: how an axis deals a tensor out, each on top of the one before.

A *shard* is a list of pieces: a piece is a box of the logical tensor and where its elements lie in the rank's local
buffer (`offset` and `strides`, in elements). A cut looks at the local tensor that the cuts before it have left and
keeps a part of it, so pipeline, expert, tensor and ZeRO cuts are applied one after another:
`compose(shape, [(cut, index), ...])`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.box import Box, row_major
from ds_dynatrain.space.run import boxes_of_run


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
    """The whole tensor on some ranks and nothing on the others (pipeline stages; several holders of a tied weight)."""

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
            raise LayoutError(f"the blocks {self.blocks} of dim {self.dim} do not deal to one number of ranks")
        if any(size < 0 for block in self.blocks for size in block):
            raise LayoutError(f"the blocks {self.blocks} of dim {self.dim} have a negative size")

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
            raise LayoutError(f"blocks {self.blocks}, together {total}, do not cover dim {self.dim} of {shape}")
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
class Flat:
    """The row-major elements dealt in equal runs of ceil(numel / count), the last ones padded (ZeRO-3)."""

    count: int

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """The boxes of the rank's run, one after another in a one-dimensional buffer."""
        _check_index(self, index)
        width = -(-math.prod(shape) // self.count)
        return FlatRun(index * width, width).parts(shape, 0)


@dataclass(frozen=True)
class FlatRun:
    """One run of the row-major elements, in a buffer of `length` elements; what lies past the tensor's end is padding.

    A flat buffer that cuts tensors anywhere (ZeRO-1/2) gives each tensor such a run.
    """

    start: int
    length: int
    count: int = 1

    def parts(self, shape: tuple[int, ...], index: int) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """The boxes of the run, one after another."""
        numel, pieces, here = math.prod(shape), [], 0
        start = min(self.start, numel)
        for box in boxes_of_run(shape, start, min(start + self.length, numel)):
            pieces.append(Placed(box, here, row_major(box.shape)))
            here += box.numel
        return (self.length,), tuple(pieces)


def even(dim: int, size: int, count: int) -> DimCut:
    """A dim of `size` cut evenly; LayoutError with the remainder if it does not divide."""
    if size % count:
        raise LayoutError(f"dim {dim} of {size} does not divide by {count} (remainder {size % count})")
    return DimCut(dim, ((size // count,) * count,))


def padded(dim: int, size: int, count: int, multiple: int = 1) -> DimCut:
    """A dim padded to a multiple of `multiple` x `count`, then cut evenly (a vocabulary)."""
    step = multiple * count
    return DimCut(dim, ((-(-size // step) * multiple,) * count,))


def uneven(dim: int, sizes: Iterable[int]) -> DimCut:
    """A dim cut in parts of the sizes given, in rank order."""
    return DimCut(dim, (tuple(sizes),))


def fused_blocks(dim: int, sizes: Iterable[int], count: int) -> DimCut:
    """Several blocks along a dim, each cut evenly (gate-and-up; query, key and value of unequal sizes)."""
    return DimCut(dim, tuple(even(dim, size, count).blocks[0] for size in sizes))


def fused_qkv(dim: int, heads: int, kv_heads: int, head_size: int, count: int) -> DimCut:
    """Query, key and value rows in one dim, cut by whole heads; LayoutError if the key-value heads do not divide."""
    if heads % count or kv_heads % count:
        raise LayoutError(f"{heads} query heads and {kv_heads} key-value heads do not both divide by {count}")
    return fused_blocks(dim, (heads * head_size, kv_heads * head_size, kv_heads * head_size), count)


def expert(experts: int, count: int) -> DimCut:
    """Whole experts, in order, of a tensor whose dim 0 counts them; LayoutError if they do not divide."""
    return even(0, experts, count)


def apply(cut: Cut, shard: Shard, index: int) -> Shard:
    """What rank `index` of a cut keeps of a local shard: the cut sees the shard's buffer as a dense tensor."""
    local, kept = cut.parts(shard.shape, index)
    pieces = [placed for part in kept for piece in shard.pieces for placed in _through(part, piece, shard.shape)]
    return Shard(local, tuple(pieces))


def compose(shape: tuple[int, ...], cuts: Iterable[tuple[Cut, int]]) -> Shard:
    """The shard of a tensor after several cuts, each with the rank's index in it, outermost axis first."""
    shard = Shard.whole(shape)
    for cut, index in cuts:
        shard = apply(cut, shard, index)
    return shard


def _through(part: Placed, piece: Placed, buffer: tuple[int, ...]) -> list[Placed]:
    """The elements of a piece that a further cut keeps at `part`, a box of the buffer that the piece lies in."""
    if len(piece.strides) == len(buffer):
        return _in_same_dims(part, piece, buffer)
    return [found for dense in _dense_parts(piece) for found in _in_flat_buffer(part, dense)]


def _in_same_dims(part: Placed, piece: Placed, buffer: tuple[int, ...]) -> list[Placed]:
    """The piece is a box of the buffer: intersect, and name what is common by the logical box."""
    left, start = piece.offset, []
    for stride in row_major(buffer):
        index, left = divmod(left, stride)
        start.append(index)
    common = part.restrict(Box.whole(piece.box.shape).shift(tuple(start)))
    if common is None:
        return []
    by = tuple(first - index for first, index in zip(piece.box.start, start, strict=True))
    return [Placed(common.box.shift(by), common.offset, common.strides)]


def _dense_parts(piece: Placed) -> list[Placed]:
    """A piece split until each part fills a run of the buffer (padding of an earlier cut may lie between its rows)."""
    dense = row_major(piece.box.shape)
    loose = [dim for dim, size in enumerate(piece.box.shape) if size > 1 and piece.strides[dim] != dense[dim]]
    if not loose:
        return [piece]
    dim, parts = loose[0], []
    for index in range(piece.box.start[dim], piece.box.stop[dim]):
        start = (*piece.box.start[:dim], index, *piece.box.start[dim + 1 :])
        stop = (*piece.box.stop[:dim], index + 1, *piece.box.stop[dim + 1 :])
        row = piece.restrict(Box(start, stop))
        parts += _dense_parts(row) if row else []
    return parts


def _in_flat_buffer(part: Placed, piece: Placed) -> list[Placed]:
    """The piece is a dense run of a one-dimensional buffer: keep a part of the run, which is a few boxes again."""
    common = part.restrict(Box((piece.offset,), (piece.offset + piece.box.numel,)))
    if common is None:
        return []
    found, here = [], common.offset
    for box in boxes_of_run(piece.box.shape, common.box.start[0] - piece.offset, common.box.stop[0] - piece.offset):
        found.append(Placed(box.shift(piece.box.start), here, row_major(box.shape)))
        here += box.numel
    return found


def _dim(shape: tuple[int, ...], dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise LayoutError(f"a tensor of shape {shape} has no dim {dim}")
    return shape[dim]


def _check_index(cut: Cut, index: int) -> None:
    if not 0 <= index < cut.count:
        raise LayoutError(f"index {index} of a cut in {cut.count}")
