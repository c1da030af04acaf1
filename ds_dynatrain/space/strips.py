"""Strips: runs (contiguous ranges of coordinates) that lie in a buffer as rows at equal distances.

A line of coordinates numbers the elements of all tensors, and a buffer (or another line) has addresses for them. The
part of a matrix that a rank holds is contiguous in the rank's buffer, but not in that of a rank that holds whole rows.
One strip describes such a part, however many rows it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_dynatrain.space import interval
from ds_dynatrain.space.interval import Ints

PLAIN = 1 << 62
"""Width and step of a plain strip, whose elements are contiguous: a single row, longer than any tensor."""


def reach(index: Ints, width: Ints, step: Ints) -> Ints:
    """Return the distance in the buffer from the first element of a strip to element `index`."""
    return index // width * step + index % width


@dataclass(frozen=True, eq=False)
class Strips:
    """Strips as a struct of int64 arrays, sorted by start and disjoint.

    start, stop: the coordinates of each strip, half open.
    address: the address of its first element.
    width: number of elements in a row.
    step: distance between the first elements of two successive rows in the buffer. Rows do not overlap.
    """

    start: Ints
    stop: Ints
    address: Ints
    width: Ints
    step: Ints

    @staticmethod
    def of(start: Ints, size: int, address: Ints, width: int = PLAIN, step: int = PLAIN) -> Strips:
        """Return strips of equal size, width and step; a strip of a single row becomes plain (`PLAIN`)."""
        width, step = (width, step) if size > width else (PLAIN, PLAIN)
        return Strips(start, start + size, address, np.full_like(start, width), np.full_like(start, step))

    @staticmethod
    def join(parts: list[Strips]) -> Strips:
        """Concatenate strips, sorted by start; contiguous neighbors are merged."""
        nothing = np.empty(0, np.int64)
        columns = interval.join([(nothing,) * 5, *(part.columns for part in parts)])
        order = np.argsort(columns[0], kind="stable")
        start, stop, address, width, step = (column[order] for column in columns)
        plain = width == PLAIN
        joined = plain[1:] & plain[:-1] & (start[1:] == stop[:-1]) & (np.diff(address) == np.diff(start))
        first, last = interval.chains(joined, len(start))
        return Strips(start[first], stop[last], address[first], width[first], step[first])

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The five arrays, in the order of the fields."""
        return self.start, self.stop, self.address, self.width, self.step

    def repeat(self, starts: Ints, addresses: Ints) -> Strips:
        """Return the strips once per entry of `starts` and `addresses`, shifted by these numbers."""
        count = len(starts)
        start, stop = (np.add.outer(starts, each).reshape(-1) for each in (self.start, self.stop))
        address = np.add.outer(addresses, self.address).reshape(-1)
        return Strips(start, stop, address, np.tile(self.width, count), np.tile(self.step, count))

    def address_of(self, strip: Ints, coordinate: Ints) -> Ints:
        """Return the address of each coordinate.

        strip: the number of the strip that contains the coordinate.
        """
        return self.address[strip] + reach(coordinate - self.start[strip], self.width[strip], self.step[strip])

    def hulls(self, start: Ints, stop: Ints) -> Hulls:
        """Return the parts of the runs [start[i], stop[i]) that lie in the strips."""
        row, strip, low, high = interval.intersect(start, stop, self.start, self.stop)
        return Hulls(self, row, strip, low, high, self.address_of(strip, low), self.address_of(strip, high - 1) + 1)

    def at_addresses(self, first: Ints, last: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (row, strip, start, stop) of the coordinates whose addresses are in [first[row], last[row])."""
        order, low, high, before, count = self._by_address
        row, group, _, _ = interval.intersect(first, last, low, high)
        again, nth = interval.expand(count[group])
        row, strip = row[again], order[before[group][again] + nth]
        start, stop = self._first_at(strip, first[row]), self._first_at(strip, last[row])
        keep = start < stop
        return row[keep], strip[keep], start[keep], stop[keep]

    def _first_at(self, strip: Ints, address: Ints) -> Ints:
        """Return, for each strip, the first coordinate at or after `address`, or the strip's end if there is none."""
        gone, width, step = np.maximum(address - self.address[strip], 0), self.width[strip], self.step[strip]
        before = gone // step * width + np.minimum(gone % step, width)
        found: Ints = np.minimum(self.start[strip] + before, self.stop[strip])
        return found

    @cached_property
    def _by_address(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Strips sorted by address, in groups of strips whose rows interleave.

        Five arrays: the order of strips; for each group its first address, its end, the number of strips before it, and
        the number of strips in it.
        """
        order = np.argsort(self.address, kind="stable")
        low, end = self.address[order], self.address_of(order, self.stop[order] - 1) + 1
        reached = np.maximum.accumulate(end) if len(end) else end
        fresh: npt.NDArray[np.bool_] = low[1:] < reached[:-1]
        first, last = interval.chains(fresh, len(order))
        return order, low[first], reached[last], first, last - first + 1


@dataclass(frozen=True, eq=False)
class Hulls:
    """Parts of runs of coordinates, each within one strip, and the range of addresses in which each part lies.

    strips: the strips.
    row: the number of the run.
    strip: the number of the strip.
    start, stop: the coordinates of the part.
    first, last: its range of addresses; if the strip has several rows, other elements may lie in this range as well.
    """

    strips: Strips
    row: Ints
    strip: Ints
    start: Ints
    stop: Ints
    first: Ints
    last: Ints

    def back(self, part: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
        """Convert ranges of addresses to coordinates of the parts they lie in: return (range, start, stop).

        part: for each range, the number of the part.
        """
        start = np.maximum(self.strips._first_at(self.strip[part], first), self.start[part])
        stop = np.minimum(self.strips._first_at(self.strip[part], last), self.stop[part])
        keep = np.flatnonzero(start < stop)
        return keep, start[keep], stop[keep]
