"""Set operations on ranges of integers, with numpy.

A range (a *run*) contains its start but not its stop. A set of ranges is two arrays, (starts, stops). It is *tidy* if
its ranges are sorted, do not overlap and are not empty. `intersect` and `subtract` take n arbitrary ranges (*rows*) and
a tidy set of m ranges, and need O((n + m + result) log m) of numpy work. They return, in the order of the rows, the row
that each result came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
AnyRows = TypeVar("AnyRows", bound=tuple[Ints, ...])
_LOW, _HIGH = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def ints(values: object) -> Ints:
    """Return `values` as a one-dimensional int64 array."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


def join(parts: Sequence[AnyRows]) -> AnyRows:
    """Concatenate several tuples of columns, column by column; at least one tuple is needed."""
    return cast("AnyRows", tuple(map(np.concatenate, zip(*parts, strict=True))))


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return each row number i repeated counts[i] times, and a counter 0, 1, ... within each row."""
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return rows, np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def chains(joined: npt.NDArray[np.bool_], count: int) -> tuple[Ints, Ints]:
    """Return the first and the last row of each chain among `count` rows.

    joined: joined[i] says whether row i + 1 continues the chain of row i.
    """
    first = np.flatnonzero(np.append(True, ~joined))[:count]
    return first, np.append(first[1:], count)[: len(first)] - 1


def intersect(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return what each row has in common with each range of a tidy set, if anything: (row, run, start, stop)."""
    first = np.searchsorted(other_stop, start, side="right")
    last = np.searchsorted(other_start, stop, side="left")
    row, nth = expand(np.maximum(last - first, 0))
    run = first[row] + nth
    low, high = np.maximum(start[row], other_start[run]), np.minimum(stop[row], other_stop[run])
    if (low >= high).any():
        keep = low < high
        row, run, low, high = row[keep], run[keep], low[keep], high[keep]
    return row, run, low, high


def subtract(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Return what is left of each row without the ranges of a tidy set: (row, start, stop)."""
    gap_start = np.concatenate([ints([_LOW]), other_stop])
    gap_stop = np.concatenate([other_start, ints([_HIGH])])
    keep = gap_start < gap_stop
    row, _, low, high = intersect(start, stop, gap_start[keep], gap_stop[keep])
    return row, low, high


def union(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return the tidy set that covers the same integers as arbitrary rows, with adjacent ranges merged."""
    keep = start < stop
    order = np.argsort(start[keep], kind="stable")
    start, stop = start[keep][order], stop[keep][order]
    if not len(start):
        return start, stop
    reach = np.maximum.accumulate(stop)
    fresh = np.concatenate([np.ones(1, dtype=bool), start[1:] > reach[:-1]])
    firsts = np.flatnonzero(fresh)
    return start[firsts], reach[np.append(firsts[1:], len(start)) - 1]


def cut_every(start: Ints, stop: Ints, width: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut each row at the multiples of its width, and return the pieces: (row, start, stop, start // width)."""
    first = start // width
    row, nth = expand(np.where(start < stop, (stop - 1) // width - first + 1, 0))
    part = first[row] + nth
    wide = width[row]
    return row, np.maximum(start[row], part * wide), np.minimum(stop[row], (part + 1) * wide), part
