"""Tilings: an order of a tensor's elements in which each rank's part, in either of two layouts, is a few runs.

In row-major order, a matrix that is cut along its columns is one run (contiguous range) per row on every rank. A tiling
splits each tensor at all boundaries of all parts in both layouts, and numbers its elements *tile* by tile, row-major
within a tile. Each part is therefore a union of whole tiles. A contiguous range of a rank's local tensor is a
contiguous range of every tile in it, because both orders are row-major there. All questions about the two layouts are
then questions about few runs.

A tile lies in every buffer as rows at equal distances (`Strips`). A tile of which two inner dims are cut would need
more levels of strides; it becomes several strips instead, one for each index in its outer dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.space.cut import Box, Placed, Shard, row_major
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.strips import Strips
from ds_dynatrain.space.tensor import CoordinateLine

Shape = tuple[int, ...]


def addresses(dims: Iterable[int], strides: Iterable[int], first: int) -> Ints:
    """Return the addresses of all elements of a block, row-major.

    first: the address of the first element.
    """
    found = np.array([first], dtype=np.int64)
    for size, stride in zip(dims, strides, strict=False):
        found = np.add.outer(found, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found


def rows(shape: Shape, pieces: Iterable[Placed]) -> Strips:
    """Return a shard of a tensor as contiguous strips of the tensor's row-major order."""
    parts, whole = [], row_major(shape)
    for piece in pieces:
        dims, length, outer = piece.box.shape, 1, len(shape)
        while outer and whole[outer - 1] == piece.strides[outer - 1] == length:
            outer -= 1
            length *= dims[outer]
        first = sum(index * step for index, step in zip(piece.box.start, whole, strict=True))
        start = addresses(dims[:outer], whole, first)
        parts.append(Strips.of(start, length, addresses(dims[:outer], piece.strides, piece.offset)))
    return Strips.join(parts)


@dataclass(frozen=True)
class Tile:
    """A block of a tensor whose elements are numbered consecutively.

    box: the block.
    start: the number of its first element.
    outer, inner: the block has one strip for each index in the dims before `outer`. The dims between are the rows of a
        strip. The dims from `inner` on are contiguous in every buffer, and form one row.
    """

    box: Box
    start: int
    outer: int
    inner: int

    @staticmethod
    def of(box: Box, start: int, strides: Sequence[Shape]) -> Tile:
        """Return the tile with the fewest strips.

        strides: the strides of every buffer in which the block lies.
        """
        dims = box.shape
        inner = _steps_from((*dims, 1), [(*each, 1) for each in strides], len(dims))
        return Tile(box, start, _steps_from(dims, strides, inner - 1) if inner else 0, inner)

    def strips(self, piece: Placed) -> Strips:
        """Return the tile's strips in the buffer of a piece, which contains the tile."""
        dims, width = self.box.shape, math.prod(self.box.shape[self.inner :])
        steps = zip(self.box.start, piece.box.start, piece.strides, strict=True)
        first = piece.offset + sum((here - origin) * stride for here, origin, stride in steps)
        address = addresses(dims[: self.outer], piece.strides, first)
        size = math.prod(dims[self.outer :])
        start = self.start + np.arange(len(address), dtype=np.int64) * size
        return Strips.of(start, size, address, width, piece.strides[self.inner - 1] if self.inner else width)


def _steps_from(dims: Shape, strides: Sequence[Shape], last: int) -> int:
    """Return the first dim that can be merged with the dims up to `last` into one dim, in every buffer."""
    first = last
    while first and (
        dims[first - 1] == 1
        or all(each[first - 1] == each[last] * math.prod(dims[first : last + 1]) for each in strides)
    ):
        first -= 1
    return first


def tiles(shape: Shape, shards: Iterable[Shard]) -> tuple[Tile, ...] | None:
    """Split a tensor at all boundaries of its shards. Returns None if row-major order suffices.

    Row-major order suffices if every shard consists of contiguous whole rows.
    """
    pieces, whole = [piece for shard in shards for piece in shard.pieces], row_major(shape)
    if all(piece.strides[1:] == whole[1:] and piece.box.shape[1:] == shape[1:] for piece in pieces):
        return None
    edges = [{0, size} for size in shape]
    for piece in pieces:
        for dim, edge in enumerate(edges):
            edge |= {piece.box.start[dim], piece.box.stop[dim]}
    found, start = list[Tile](), 0
    for spans in itertools.product(*(itertools.pairwise(sorted(edge)) for edge in edges)):
        box = Box(tuple(low for low, _ in spans), tuple(high for _, high in spans))
        strides = {piece.strides for piece in pieces if piece.box.contains(box)}
        found.append(Tile.of(box, start, [whole, *strides]))
        start += box.numel
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Tiling:
    """The order in which two layouts number the elements of all tensors.

    forms: for each tensor, the number of its form; tensors of one form have the same shape and are cut alike.
    tiles: the tiles of each form, or None if its tensors are numbered in row-major order.
    strips: the strips of all tensors in the line of row-major coordinates.
    """

    forms: tuple[int, ...]
    tiles: tuple[tuple[Tile, ...] | None, ...]
    strips: Strips

    @staticmethod
    def of(line: CoordinateLine, forms: Sequence[Hashable], shards: Callable[[int], Iterable[Shard]]) -> Tiling | None:
        """Build the tiling of all tensors. Returns None if row-major order suffices for all of them.

        forms: one value per tensor; tensors with equal values have the same shape and are cut alike in both layouts.
        shards: function that returns all shards of a tensor in both layouts.
        """
        known = dict[Hashable, int]()
        numbers = tuple(known.setdefault(form, len(known)) for form in forms)
        firsts = np.unique(numbers, return_index=True)[1].tolist()
        found = [tiles(line.tensors[first].shape, shards(first)) for first in firsts]
        if found.count(None) == len(found):
            return None
        parts, of_form = list[Strips](), np.array(numbers)
        for number, (each, first) in enumerate(zip(found, firsts, strict=True)):
            bases = line.bases[np.flatnonzero(of_form == number)]
            whole = Shard.whole(line.tensors[first].shape)
            parts.append(strips_of(whole, line.tensors[first].shape, each).repeat(bases, bases))
        return Tiling(numbers, tuple(found), Strips.join(parts))


def strips_of(shard: Shard, shape: Shape, split: Iterable[Tile] | None) -> Strips:
    """Return the strips of a shard of a tensor in its local buffer.

    shape: the shape of the tensor.
    split: the tensor's tiles, or None if its elements are numbered in row-major order.
    """
    if split is None:
        return rows(shape, shard.pieces)
    pairs = itertools.product(split, shard.pieces)
    return Strips.join([tile.strips(piece) for tile, piece in pairs if piece.box.contains(tile.box)])
