"""CRC32s that a file notes of its own members, compared with what is read of them, while it is read.

Whoever reads a member in order pays one sum over its bytes, and no second read.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ds_dynatrain.errors import CheckpointDamaged


@dataclass(frozen=True)
class Member:
    """Bytes of a file that have a CRC32. name: as the file has it. end: the first byte behind it."""

    file: str
    name: str
    first: int
    end: int
    crc: int


class Crcs:
    """Sums of members that do not overlap, as far as they were read from their beginning on."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members: dict[str, list[Member]] = {}
        for member in sorted(members, key=lambda each: (each.file, each.first)):
            self._members.setdefault(member.file, []).append(member)
        self._begins = {file: [each.first for each in held] for file, held in self._members.items()}
        self._sums: dict[Member, tuple[int, int]] = {}  # -> (byte up to which it was read, sum)

    def __iter__(self) -> Iterator[Member]:
        for held in self._members.values():
            yield from held

    def at(self, file: str, byte: int) -> Member | None:
        """The member that a byte is of."""
        place = bisect_right(self._begins.get(file, []), byte) - 1
        found = self._members[file][place] if place >= 0 else None
        return found if found is not None and byte < found.end else None

    def saw(self, file: str, at: int, data: memoryview) -> None:
        """Bytes were read. What is behind a gap is left for the end."""
        begins = self._begins.get(file)
        if not begins:
            return
        end = at + len(data)
        for place in range(max(0, bisect_right(begins, at) - 1), bisect_right(begins, end - 1)):
            member = self._members[file][place]
            done, crc = self._sums.get(member, (member.first, 0))
            stop = min(end, member.end)
            if at <= done < stop:
                self._sums[member] = stop, zlib.crc32(data[done - at : stop - at], crc)

    def read_until(self, member: Member) -> int:
        """The byte up to which a member was read."""
        return self._sums.get(member, (member.first, 0))[0]

    def check(self, member: Member) -> None:
        """CheckpointDamaged, naming file and member, if it is not what was saved; all of it must have been read."""
        if self._sums.get(member, (member.first, 0)) != (member.end, member.crc):
            raise CheckpointDamaged(
                f"{member.file} is not what was saved: {member.name} in it, bytes {member.first} to {member.end}, has "
                f"another CRC32 than it was written with"
            )
