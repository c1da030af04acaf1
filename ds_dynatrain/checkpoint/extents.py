"""Extents: parts of a tensor that are contiguous in a file. In the tensor they are equally spaced ranges ("runs").

A part cut by ZeRO is an extent with one run. A block of rows and columns cut by the tensor axis is an extent with one
run per row. In the file the runs follow one another without gaps. Element types have torch's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ds_dynatrain.errors import CheckpointDamaged
from ds_dynatrain.space import BufferId, Pieces
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.tensor import CoordinateLine, split_by_tensor
from ds_dynatrain.transfer import digest, digest_pieces
from ds_dynatrain.transfer.series import series

_CHUNK = BufferId("tensor", 0)
ALIGN = 8
"""Alignment of values in a data file, in bytes, as in Arrow: pyarrow pads values to a multiple of this number."""
DIGEST_ELEMENTS = 1 << 18
"""Number of elements that are digested at once; few enough to stay in the cache."""
WORD = (1 << 64) - 1
"""Bit mask of digests, which are sums modulo 2^64."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of an element type, such as "bfloat16"."""
    return str(dtype).partition(".")[2]


def named(name: str) -> torch.dtype:
    """Return the element type with the given name. Raises CheckpointDamaged if torch has no such type."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or name != name_of(found):
        raise CheckpointDamaged(
            f"elements of type {name!r}, which torch {torch.__version__} does not know; use a torch that has the type"
        )
    return found


@dataclass(frozen=True)
class Extent:
    """A part of a logical tensor: `count` ranges ("runs") of `length` elements.

    start: the flat (row-major) index of the first element in the tensor.
    step: the distance between the starts of two runs.
    """

    start: int
    length: int
    step: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        """Number of elements in all runs."""
        return self.length * self.count

    def matrix_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the extent's elements of a flat tensor as a view with one row per run."""
        return matrix_in(flat, self.start, self.step, self.length, self.count)

    def parts(self, most: int) -> Iterator[Extent]:
        """Yield parts of at most `most` elements, in order. Each part consists of whole runs, or lies in one run.

        The positions of the parts count elements as if the runs lay back to back.
        """
        if self.count > 1 and self.length <= most:
            height = most // self.length
            for row in range(0, self.count, height):
                yield Extent(row * self.length, self.length, self.length, min(height, self.count - row))
            return
        for row in range(0, self.numel, self.length):
            for begin in range(0, self.length, most):
                yield Extent(row + begin, min(most, self.length - begin))

    def __str__(self) -> str:
        end = self.start + self.length
        if self.count == 1:
            return f"elements [{self.start}, {end})"
        return f"{self.count} runs of {self.length} elements, {self.step} apart, from element {self.start}"


def placed(
    line: CoordinateLine, sides: tuple[Pieces, ...], buffers: tuple[dict[BufferId, torch.Tensor], ...]
) -> Iterator[tuple[int, Extent, tuple[torch.Tensor, ...]]]:
    """Yield the fewest extents that cover the given pieces, in order, as (tensor number, extent, matrices).

    The matrices are views of the extent's values in the buffers of each side, with one row per run.

    sides: one or more descriptions of the same pieces, in different buffers.
    buffers: the buffers of each side.
    """
    split = [split_by_tensor(line.bases, side) for side in sides]
    numbers, first = split[0][0], split[0][1]
    parts = [part for _, part in split]
    start, length = first.start - line.bases[numbers], first.stop - first.start
    offsets = tuple(part.offset for part in parts)
    rows, counts = regular((numbers, *(part.buffer for part in parts)), length, offsets, start)
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        step = int(start[row + 1] - start[row]) if count > 1 else 0
        extent = Extent(int(start[row]), int(length[row]), step, count)
        found = []
        for part, held in zip(parts, buffers, strict=True):
            offset = int(part.offset[row])
            stride = int(part.offset[row + 1]) - offset if count > 1 else extent.length
            buffer = held[part.buffers[int(part.buffer[row])]].detach()
            found.append(matrix_in(buffer, offset, stride, extent.length, extent.count))
        yield int(numbers[row]), extent, tuple(found)


def regular(keys: tuple[Ints, ...], length: Ints, offsets: tuple[Ints, ...], begin: Ints) -> tuple[Ints, Ints]:
    """Group consecutive runs that form matrices; return (first run, number of runs) of each.

    keys: properties that all runs of a matrix share, besides their length.
    offsets: positions of the runs in memory. Within a matrix, no run begins before the previous one ends.
    begin: one more position of each run. Within a matrix, positions of each sort are equally spaced.
    """
    same = np.zeros(len(length), np.int64)
    for key in (length, *keys):
        same = same * (int(key.max(initial=0)) + 1) + key
        same = np.unique(same, return_inverse=True)[1].astype(np.int64)
    for offset in offsets:
        odd = np.flatnonzero((np.diff(offset, append=0) < length) & (np.diff(same, append=-1) == 0))
        same = same.copy()
        same[odd] = -1 - odd
    return series(same, begin, *offsets)


def matrix_in(flat: torch.Tensor, first: int, step: int, length: int, count: int) -> torch.Tensor:
    """Return runs of a flat contiguous tensor as a view with one row per run.

    first: the index of the first run's first element.
    step: the distance between the starts of two runs.

    Raises RuntimeError if the runs leave the tensor.
    """
    held = flat.narrow(0, first, (count - 1) * step + length)
    return held.as_strided((count, length), (step, 1), held.storage_offset())


def chunks(matrix: torch.Tensor, most: int) -> Iterator[tuple[Extent, torch.Tensor]]:
    """Yield the values of a matrix in flat chunks of at most `most` elements in host memory, each with its extent.

    The extent counts elements as if the matrix were dense. A chunk that is a single run and already in host memory is
    not copied.
    """
    count, length = matrix.shape
    for at in Extent(0, length, length, count).parts(most):
        row, column = divmod(at.start, length)
        yield at, matrix[row : row + at.count, column : column + at.length].to("cpu").reshape(-1)


def digest_of(extent: Extent, at: Extent, values: torch.Tensor, numel: int) -> int:
    """Return the contribution of a chunk to the digest of a tensor of `numel` elements.

    extent: the extent of the tensor that contains the chunk.
    at: the chunk's position in `extent`, as `chunks` yields it.
    values: the values of the chunk.
    """
    row, column = divmod(at.start, extent.length)
    first = extent.start + row * extent.step + column
    if at.count == 1:
        return digest(values, first)
    starts = first + extent.step * np.arange(at.count, dtype=np.int64)
    ends, offsets = starts + at.length, at.length * np.arange(at.count, dtype=np.int64)
    pieces = Pieces(starts, ends, np.zeros(at.count, np.int64), offsets, (_CHUNK,))
    return int(digest_pieces(pieces, {_CHUNK: values}, np.array([0, numel], np.int64))[0])


def digest_of_part(matrix: torch.Tensor, part: Extent, numel: int, dtype: torch.dtype | None = None) -> int:
    """Return the contribution of a part, or of its values cast to `dtype`, to the digest of a tensor.

    matrix: the part's elements, one row per run.
    numel: number of elements of the tensor.
    """
    pairs = chunks(matrix, DIGEST_ELEMENTS) if part.numel else ()
    return sum(digest_of(part, at, values.to(dtype or values.dtype), numel) for at, values in pairs) & WORD


def runs_of(extent: Extent) -> tuple[Ints, Ints]:
    """Return two arrays with the index of each run's first element: in the tensor, and within the extent."""
    steps = np.arange(extent.count, dtype=np.int64)
    return extent.start + extent.step * steps, extent.length * steps
