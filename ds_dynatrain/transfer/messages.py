"""Messages: how the moves from one member to another are cut and packed, the same on both sides without a header.

A large move travels as it lies, straight from buffer to buffer, in messages of at most `longest` bytes. Small moves are
packed in their order into messages of at most `chunk` bytes, which both sides stage. The list follows from the lengths
of the moves and from these two numbers alone, so sender and receiver derive the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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

    @property
    def is_packed(self) -> bool:
        """Whether several moves must be put together in memory of their own."""
        return len(self.rows) > 1


def messages(lengths: Iterable[int], chunk: int, longest: int) -> list[Message]:
    """The messages for moves of `lengths` bytes, in the order of sending."""
    found: list[Message] = []
    small: list[int] = []
    filled = 0
    for row, length in enumerate(lengths):
        if length >= min(DIRECT_BYTES, chunk):
            found += [Message((row,), start, min(start + longest, length)) for start in range(0, length, longest)]
            continue
        if filled + length > chunk:
            found.append(Message(tuple(small), 0, filled))
            small, filled = [], 0
        if length:
            small.append(row)
            filled += length
    if small:
        found.append(Message(tuple(small), 0, filled))
    return found
