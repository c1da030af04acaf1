"""Vectorized set operations on runs (half-open integer ranges); a set of runs is given as two arrays (starts, stops).

A set is *tidy* if its runs are sorted, disjoint and not empty. Operations take n arbitrary runs (*rows*) and m tidy
runs, and need O((n + m + result) log m) numpy operations. They return the row that each part of the result came from,
in row order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
AnyRows = TypeVar("AnyRows", bound=tuple[Ints, ...])


class Runs(NamedTuple):
    """Half-open runs [start[i], stop[i]) that are sorted, disjoint and not empty."""

    start: Ints
    stop: Ints

    @property
    def numel(self) -> int:
        """Number of coordinates in all runs."""
        return int((self.stop - self.start).sum())


def ints(values: object) -> Ints:
    """Return `values` as a one-dimensional int64 array."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


def join(parts: Sequence[AnyRows]) -> AnyRows:
    """Concatenate the first arrays of all tuples, their second arrays, and so on. At least one tuple is needed."""
    return cast("AnyRows", tuple(map(np.concatenate, zip(*parts, strict=True))))


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return two arrays: each row number i repeated counts[i] times, and a counter 0, 1, ... within each row."""
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return rows, np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def chains(joined: npt.NDArray[np.bool_], count: int) -> tuple[Ints, Ints]:
    """Group `count` consecutive rows into chains; return the first and the last row of each chain.

    joined: joined[i] says whether row i + 1 continues the chain of row i.
    """
    first = np.flatnonzero(np.append(True, ~joined))[:count]
    return first, np.append(first[1:], count)[: len(first)] - 1


def intersect(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the non-empty intersections of arbitrary runs with a second set of sorted, disjoint runs.

    An intersection is given as (row, run, start, stop): the index of the arbitrary run, the index of the run in the
    second set, and the range that they share.
    """
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
    """Return the parts of arbitrary runs that lie outside a second set of sorted, disjoint runs.

    A part is given as (row, start, stop); row is the index of the arbitrary run.
    """
    row, _, low, high = intersect(start, stop, other_start, other_stop)
    return outside(start, stop, row, low, high)


def outside(start: Ints, stop: Ints, row: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Return what is left of runs when given parts are removed, as (row, start, stop).

    row, low, high: the parts to remove, which must be disjoint; `row` is the index of the run that contains each part.
    """
    rows = np.concatenate([np.arange(len(start), dtype=np.int64), row])
    begin, end = np.concatenate([start, high]), np.concatenate([stop, low])
    by_begin, by_end = np.lexsort((begin, rows)), np.lexsort((end, rows))
    keep = begin[by_begin] < end[by_end]
    return rows[by_begin][keep], begin[by_begin][keep], end[by_end][keep]


def union(start: Ints, stop: Ints) -> Runs:
    """Return the union of arbitrary runs as sorted, disjoint runs; adjacent runs are merged."""
    keep = start < stop
    order = np.argsort(start[keep], kind="stable")
    start, stop = start[keep][order], stop[keep][order]
    if not len(start):
        return Runs(start, stop)
    reach = np.maximum.accumulate(stop)
    fresh = np.concatenate([np.ones(1, dtype=bool), start[1:] > reach[:-1]])
    firsts = np.flatnonzero(fresh)
    return Runs(start[firsts], reach[np.append(firsts[1:], len(start)) - 1])


def cut_every(start: Ints, stop: Ints, width: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut each run at all multiples of `width[row]`; return the parts as (row, start, stop, start // width)."""
    first = start // width
    row, nth = expand(np.where(start < stop, (stop - 1) // width - first + 1, 0))
    part = first[row] + nth
    wide = width[row]
    return row, np.maximum(start[row], part * wide), np.minimum(stop[row], (part + 1) * wide), part
