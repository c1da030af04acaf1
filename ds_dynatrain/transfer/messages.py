"""Messages: how the moves from one member to another are cut and packed, the same on both sides without a header.

A large move travels as it lies, straight from buffer to buffer, in messages of at most `longest` bytes. Small moves are
packed in their order into messages of at most `chunk` bytes, which both sides stage. The list follows from the lengths
of the moves and from these two numbers alone, so sender and receiver derive the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

DIRECT_BYTES = 256 * 1024
"""Moves from this size on are not packed: a message of its own costs less than two copies."""


@dataclass(frozen=True)
class Message:
    """Moves that travel together: the whole of each of `rows` (start is 0), or bytes start to stop of the only one."""

    rows: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.stop - self.start


def messages(lengths: Iterable[int], chunk: int, longest: int) -> list[Message]:
    """The messages for moves of `lengths` bytes, in the order of sending."""
    length = np.array([*lengths], dtype=np.int64)
    direct = length >= min(DIRECT_BYTES, chunk)
    found: list[tuple[int, Message]] = []
    for row, total in zip(np.flatnonzero(direct).tolist(), length[direct].tolist(), strict=True):
        cuts = range(0, total, longest)
        found += [(row, Message((row,), start, min(start + longest, total))) for start in cuts]
    small = np.flatnonzero(~direct & (length > 0))
    ends = np.cumsum(length[small])
    first, before = 0, 0
    while first < len(small):  # a message is sent when the next move does not go into it
        last = int(np.searchsorted(ends, before + chunk, side="right"))
        when, after = int(small[last]) if last < len(small) else len(length), int(ends[last - 1])
        found.append((when, Message(tuple(small[first:last].tolist()), 0, after - before)))
        first, before = last, after
    return [message for _, message in sorted(found, key=lambda each: each[0])]
