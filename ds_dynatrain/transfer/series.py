"""Series: byte ranges (runs) of equal length at equal distances, which numpy can copy or digest in one call.

If the tensor axis cuts a dimension, each row of a weight is a separate run, and handling the runs one by one would cost
microseconds per run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynatrain.space.interval import Ints

Bytes = npt.NDArray[np.uint8]


class Matrix(NamedTuple):
    """A matrix of bytes in a buffer: `number` rows of `length` bytes; row i begins at byte begin + i * step.

    which: the number of the buffer.
    """

    which: int
    begin: int
    step: int
    number: int
    length: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in all rows together."""
        return self.number * self.length


def series(same: Ints, *begins: Ints) -> tuple[Ints, Ints]:
    """Group consecutive rows of a table into series; return the first row and the number of rows of each series.

    same: one value per row; only rows with equal values can share a series.
    begins: one or more arrays with a position for each row; within a series, neighbors differ by a constant step.
    """
    count = len(same)
    goes_on = np.zeros(count, dtype=bool)  # whether a row and the two before it are equally spaced
    if count > 2:
        linked = np.diff(same) == 0
        goes_on[2:] = linked[1:] & linked[:-1]
        for begin in begins:
            step = np.diff(begin)
            goes_on[2:] &= step[1:] == step[:-1]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], goes_on, [False]])))
    third, stop = edges[::2], edges[1::2]
    first = third - 2
    first[1:] = np.maximum(first[1:], stop[:-1])  # a row that fits two series belongs to the first
    is_left = stop - first > 2
    first, stop = first[is_left], stop[is_left]
    depth = np.zeros(count + 1, np.int64)
    np.add.at(depth, first + 1, 1)
    np.add.at(depth, stop, -1)
    opens = np.flatnonzero(np.cumsum(depth)[:count] == 0)
    return opens, np.diff(np.append(opens, count))


def rows_of(data: Bytes, begin: int, step: int, count: int, length: int) -> Bytes:
    """Return a series of byte ranges in a flat array as a writable view of shape (count, length).

    begin: the offset of the first range.
    step: the distance between the beginnings of two ranges.
    count: the number of ranges.
    length: the number of bytes in each range.
    """
    try:
        return np.ndarray((count, length), np.uint8, data, begin, (step, 1))
    except ValueError as error:
        ends = begin, begin + step * (count - 1)
        where = f"from byte {min(ends)} to {max(ends) + length} leave an array of {len(data)} bytes"
        raise IndexError(f"runs {where}") from error
