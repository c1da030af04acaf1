"""Pieces: the runs of coordinates that a rank holds, and where each lies in the rank's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_dynatrain.space import interval
from ds_dynatrain.space.tensor import Ints, Line


class BufferId(NamedTuple):
    """Name of a one-dimensional local buffer of one state kind.

    place: "tensor" (a whole tensor), "partition" (a rank's part of a frozen tensor), "group" (the flat buffer of an
    optimizer group) or "subgroup" (of a ZeRO-3 sub-group); index: the tensor's, group's or sub-group's number.
    """

    place: str
    index: int  # type: ignore[assignment]  # the field hides tuple.index


class Piece(NamedTuple):
    """One run [start, stop) of coordinates, at `offset` elements into a buffer."""

    start: int
    stop: int
    buffer: BufferId
    offset: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of coordinates as a struct of int64 arrays, sorted by start and disjoint.

    start, stop: coordinates, half open. buffer: index into `buffers`. offset: elements into that buffer.
    """

    start: Ints
    stop: Ints
    buffer: Ints
    offset: Ints
    buffers: tuple[BufferId, ...] = ()

    @classmethod
    def empty(cls, buffers: tuple[BufferId, ...] = ()) -> Pieces:
        """No piece at all."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, nothing, buffers)

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.start)

    def __iter__(self) -> Iterator[Piece]:
        """The runs one by one."""
        for start, stop, buffer, offset in zip(
            self.start.tolist(), self.stop.tolist(), self.buffer.tolist(), self.offset.tolist(), strict=True
        ):
            yield Piece(start, stop, self.buffers[buffer], offset)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int((self.stop - self.start).sum())

    def take(self, row: Ints, start: Ints, stop: Ints) -> Pieces:
        """The parts [start[i], stop[i]) of the pieces row[i], with the offsets of the parts."""
        return Pieces(start, stop, self.buffer[row], self.offset[row] + start - self.start[row], self.buffers)

    def intersect(self, other: Pieces) -> tuple[Pieces, Pieces]:
        """What both hold: equal runs, once with the own buffers and offsets, once with the other's."""
        row, run, start, stop = interval.intersect(self.start, self.stop, other.start, other.stop)
        return self.take(row, start, stop), other.take(run, start, stop)

    def restrict(self, start: Ints, stop: Ints) -> Pieces:
        """What lies within the sorted, disjoint runs [start[i], stop[i])."""
        row, _, low, high = interval.intersect(self.start, self.stop, start, stop)
        return self.take(row, low, high)

    def subtract(self, start: Ints, stop: Ints) -> Pieces:
        """What lies outside of the sorted, disjoint runs [start[i], stop[i])."""
        row, low, high = interval.subtract(self.start, self.stop, start, stop)
        return self.take(row, low, high)

    def coalesce(self) -> Pieces:
        """The same elements in the fewest runs: neighbors on the line and in the buffer become one."""
        if len(self) < 2:
            return self
        joined = (
            (self.start[1:] == self.stop[:-1])
            & (self.buffer[1:] == self.buffer[:-1])
            & (self.offset[1:] - self.offset[:-1] == self.start[1:] - self.start[:-1])
        )
        first = np.flatnonzero(np.append(True, ~joined))
        last = np.append(first[1:], len(self)) - 1
        return Pieces(self.start[first], self.stop[last], self.buffer[first], self.offset[first], self.buffers)


def split_by_tensor(line: Line, pieces: Pieces) -> tuple[Ints, Pieces]:
    """Pieces cut where one tensor of the line ends and the next begins, and the tensor number of each."""
    filled = np.flatnonzero(line.numels)
    start, stop = line.bases[filled], line.bases[filled + 1]
    row, tensor, low, high = interval.intersect(pieces.start, pieces.stop, start, stop)
    return filled[tensor], pieces.take(row, low, high)
