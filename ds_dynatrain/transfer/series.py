"""Series: runs of one length at equal steps, which numpy copies and weighs at once.

A dim that the tensor axis cuts leaves a run for every row of a matrix; one by one they cost microseconds each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def series(same: Ints, *begins: Ints) -> tuple[Ints, Ints]:
    """(first row, number of rows) of the series that rows fall into, in order.

    same: one value per row, equal for rows that may share a series (their length, their buffers). begins: where the
    rows begin, on one side or on several; in a series each of them grows by a step of its own.
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
    depth = np.zeros(count + 1, np.int64)
    np.add.at(depth, first + 1, 1)
    np.add.at(depth, stop, -1)
    opens = np.flatnonzero(np.cumsum(depth)[:count] == 0)
    return opens, np.diff(np.append(opens, count))


def rows_of(data: Bytes, begin: int, step: int, count: int, length: int) -> Bytes:
    """The runs of a series in a flat array of bytes, as a matrix of `count` x `length` bytes; writing goes through."""
    if count == 1:
        return data[begin : begin + length].reshape(1, length)
    low = min(begin, begin + step * (count - 1))
    high = max(begin, begin + step * (count - 1)) + length
    window = data[low:high]  # numpy checks the bounds here, and not below
    if len(window) != high - low:
        raise IndexError(f"runs from byte {low} to {high} leave an array of {len(data)} bytes")
    return np.lib.stride_tricks.as_strided(window[begin - low :], (count, length), (step, 1))
