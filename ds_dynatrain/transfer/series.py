"""Series: runs of equal length at equal steps, which numpy can copy or digest in one call.

If the tensor axis cuts a dimension, each row of a weight is a separate run, and handling runs one by one would cost
microseconds for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Matrix(NamedTuple):
    """A series of `number` runs of `length` bytes in buffer number `which`; run i begins at byte begin + i * step."""

    which: int
    begin: int
    step: int
    number: int
    length: int

    @property
    def nbytes(self) -> int:
        """Total bytes of all runs."""
        return self.number * self.length


def matrices(which: Ints, begin: Ints, length: Ints) -> list[Matrix]:
    """Group runs, in order, into few matrices, and merge adjacent runs.

    which, begin, length: the buffer, first byte and number of bytes of each run.
    """
    first, count = series(which * (int(length.max(initial=0)) + 1) + length, begin)
    found = _matrices(which, begin, length, first, count)
    for at, each in enumerate(found):
        if each.number > 1 and each.step == each.length:
            found[at] = Matrix(each.which, each.begin, 0, 1, each.nbytes)
    return found


def pairs(mine: tuple[Ints, Ints], others: tuple[Ints, Ints], length: Ints) -> list[tuple[Matrix, Matrix]]:
    """Group pairs of runs, in order, into few pairs of matrices of equal shape.

    mine, others: the buffer and the first byte of the first run of each pair, and of the second.
    length: the number of bytes of both runs of each pair.
    """
    (which, begin), (into, at) = mine, others
    same = (which * (int(into.max(initial=0)) + 1) + into) * (int(length.max(initial=0)) + 1) + length
    first, count = series(same, begin, at)
    sides = _matrices(which, begin, length, first, count), _matrices(into, at, length, first, count)
    return list(zip(*sides, strict=True))


def _matrices(which: Ints, begin: Ints, length: Ints, first: Ints, count: Ints) -> list[Matrix]:
    """Return one matrix for each series of runs. The step of a series with a single run is 0.

    first, count: the number of the first run of each series, and its number of runs.
    """
    step = np.where(count > 1, np.append(begin[1:], 0)[first] - begin[first], 0)
    columns = np.stack((which[first], begin[first], step, count, length[first]), axis=1)
    return list(map(Matrix._make, columns.tolist()))


def series(same: Ints, *begins: Ints) -> tuple[Ints, Ints]:
    """Group consecutive rows into series; return (first row, number of rows) of each.

    same: one value per row; only rows with equal values can share a series.
    begins: one or more arrays with the position of each row; within a series each of them has a constant step.
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
    first[1:] = np.maximum(first[1:], stop[:-1])  # a row that two series could have belongs to the first
    is_left = stop - first > 2
    first, stop = first[is_left], stop[is_left]
    depth = np.zeros(count + 1, np.int64)
    np.add.at(depth, first + 1, 1)
    np.add.at(depth, stop, -1)
    opens = np.flatnonzero(np.cumsum(depth)[:count] == 0)
    return opens, np.diff(np.append(opens, count))


def rows_of(data: Bytes, begin: int, step: int, count: int, length: int) -> Bytes:
    """Return the runs of a series in a flat array of bytes as a writable view of shape (count, length)."""
    try:
        return np.ndarray((count, length), np.uint8, data, begin, (step, 1))
    except ValueError as error:
        ends = begin, begin + step * (count - 1)
        where = f"from byte {min(ends)} to {max(ends) + length} leave an array of {len(data)} bytes"
        raise IndexError(f"runs {where}") from error
