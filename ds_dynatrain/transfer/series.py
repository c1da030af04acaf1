"""Series: runs of one length at equal steps, which numpy copies and weighs at once.

A dim that the tensor axis cuts leaves a run for every row of a matrix; one by one they cost microseconds each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Matrix(NamedTuple):
    """`number` runs of `length` bytes in buffer `which`; the first begins at byte `begin`, each other `step` bytes
    later.
    """

    which: int
    begin: int
    step: int
    number: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.number * self.length


def matrices(which: Ints, begin: Ints, length: Ints) -> list[Matrix]:
    """Return the runs, in order, as few matrices; runs that touch are joined."""
    first, count = series(which * (int(length.max(initial=0)) + 1) + length, begin)
    found = _matrices(which, begin, length, first, count)
    for at, each in enumerate(found):
        if each.number > 1 and each.step == each.length:
            found[at] = Matrix(each.which, each.begin, 0, 1, each.nbytes)
    return found


def pairs(mine: tuple[Ints, Ints], others: tuple[Ints, Ints], length: Ints) -> list[tuple[Matrix, Matrix]]:
    """Return runs on two sides, (which, begin) of each, as few pairs of matrices of equal counts and lengths."""
    (which, begin), (into, at) = mine, others
    same = (which * (int(into.max(initial=0)) + 1) + into) * (int(length.max(initial=0)) + 1) + length
    first, count = series(same, begin, at)
    sides = _matrices(which, begin, length, first, count), _matrices(into, at, length, first, count)
    return list(zip(*sides, strict=True))


def _matrices(which: Ints, begin: Ints, length: Ints, first: Ints, count: Ints) -> list[Matrix]:
    """Return the series of `count` rows from each `first` on as matrices; a single run has no step."""
    step = np.where(count > 1, np.append(begin[1:], 0)[first] - begin[first], 0)
    columns = np.stack((which[first], begin[first], step, count, length[first]), axis=1)
    return list(map(Matrix._make, columns.tolist()))


def series(same: Ints, *begins: Ints) -> tuple[Ints, Ints]:
    """Return (first row, number of rows) of the series that rows fall into, in order.

    same: one value per row, equal for rows that may share a series (their length, their buffers). begins: positions
    where the rows begin, on one side or on several; within a series each of them grows by a constant step.
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
    first[1:] = np.maximum(first[1:], stop[:-1])  # the series before has taken the row that both could have
    is_left = stop - first > 2
    first, stop = first[is_left], stop[is_left]
    depth = np.zeros(count + 1, np.int64)
    np.add.at(depth, first + 1, 1)
    np.add.at(depth, stop, -1)
    opens = np.flatnonzero(np.cumsum(depth)[:count] == 0)
    return opens, np.diff(np.append(opens, count))


def rows_of(data: Bytes, begin: int, step: int, count: int, length: int) -> Bytes:
    """Return the runs of a series in a flat array of bytes as a view of `count` x `length` bytes, which may be written
    to.
    """
    try:
        return np.ndarray((count, length), np.uint8, data, begin, (step, 1))
    except ValueError as error:
        ends = begin, begin + step * (count - 1)
        where = f"from byte {min(ends)} to {max(ends) + length} leave an array of {len(data)} bytes"
        raise IndexError(f"runs {where}") from error
