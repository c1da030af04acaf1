"""Geometry of a weight update: which part of a tensor a receiving rank holds, and which elements a sending rank has.

A part is one block along one dimension, cut as `torch.chunk` does, and row-major in the receiver's memory. Parts, and
the elements that a sender holds, are both extents (equally long ranges at equal distances). The intersection of two
extents is a few series of contiguous ranges, "runs"; one call copies each series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ds_dynatrain.checkpoint.extents import Extent, runs_of
from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import interval
from ds_dynatrain.transfer.series import series


class Move(NamedTuple):
    """A strided copy of `runs` contiguous ranges of `length` elements from a sender's flat values to a receiver's.

    at: the offset of the first range in the sender's values.
    step: the stride between ranges in the sender's values.
    to: the offset of the first range in the receiver's values.
    pace: the stride between ranges in the receiver's values.
    """

    at: int
    step: int
    to: int
    pace: int
    length: int
    runs: int

    @property
    def numel(self) -> int:
        """Number of elements that are copied."""
        return self.length * self.runs


def part_of(shape: Sequence[int], dim: int | None, rank: int, size: int) -> tuple[Extent, tuple[int, ...]]:
    """Return a receiving rank's part of a tensor: its extent in the tensor, and its shape.

    dim: the dimension that is cut among `size` ranks; None if each rank holds the whole tensor.
    """
    if dim is None:
        return Extent(0, math.prod(shape)), tuple(shape)
    width = -(-shape[dim] // size)
    begin, end = min(rank * width, shape[dim]), min((rank + 1) * width, shape[dim])
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    part = (*shape[:dim], end - begin, *shape[dim + 1 :])
    step = shape[dim] * inner if outer > 1 else 0
    return Extent(begin * inner, (end - begin) * inner, step, outer), part


def moves_between(held: Extent, part: Extent) -> list[Move]:
    """Return the moves that copy elements of a tensor held by a sender into a receiver's part.

    held: the elements that the sender holds.
    part: the elements that the receiver needs.
    """
    if not held.numel or not part.numel:
        return []
    (mine, mine_at), (theirs, theirs_at) = runs_of(held), runs_of(part)
    row, run, start, stop = interval.intersect(theirs, theirs + part.length, mine, mine + held.length)
    at, to, length = mine_at[run] + start - mine[run], theirs_at[row] + start - theirs[row], stop - start
    found = []
    for first, count in zip(*series(length, at, to), strict=True):
        step, pace = (int(at[first + 1] - at[first]), int(to[first + 1] - to[first])) if count > 1 else (0, 0)
        number, size = int(count), int(length[first])
        if step == pace == size:
            number, size, step, pace = 1, number * size, 0, 0
        found.append(Move(int(at[first]), step, int(to[first]), pace, size, number))
    return found


def check_coverage(name: str, numel: int, moves: Iterable[Move]) -> None:
    """Raise TransferError unless `moves` write each element of a receiver's part of a tensor exactly once.

    numel: the number of elements of the part.
    """
    known = list(moves)
    start = np.concatenate([np.empty(0, np.int64), *(move.to + move.pace * np.arange(move.runs) for move in known)])
    stop = start + np.repeat(interval.ints([move.length for move in known]), [move.runs for move in known])
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    expected, found = np.append(0, stop), np.append(start, numel)
    wrong = np.flatnonzero(expected != found)
    if len(wrong):
        reached, follows = int(expected[wrong[0]]), int(found[wrong[0]])
        what = (
            f"elements [{reached}, {follows}) are sent by no rank"
            if follows > reached
            else (f"element {follows} is sent twice, or lies outside of the {numel} elements")
        )
        raise TransferError(f"{name}: {what}; the trainer's ranks do not describe the same layout: make a new source")
