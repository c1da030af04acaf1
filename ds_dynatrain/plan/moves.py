"""Moves: runs of coordinates to copy from buffers of one member into buffers of another member, or of the same one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import BufferId, Kind, Pieces
from ds_dynatrain.space.interval import Ints, chains

COLUMNS = (
    "kind",
    "start",
    "stop",
    "source",
    "target",
    "source_kind",
    "source_buffer",
    "source_offset",
    "target_buffer",
    "target_offset",
)


@dataclass(frozen=True, eq=False)
class Moves:
    """Runs of elements to copy, as int64 arrays with one entry per run.

    kind: index into `kinds` of the state kind that is written.
    start, stop: the coordinates of the run.
    source, target: the members that send and receive.
    source_kind: index into `kinds` of the state kind that is read. Its element size differs from that of `kind` only if
    a weight is cast from its master.
    source_buffer, target_buffer: indices into `source_buffers` and `target_buffers`.
    source_offset, target_offset: the first element within these buffers.
    """

    kind: Ints
    start: Ints
    stop: Ints
    source: Ints
    target: Ints
    source_kind: Ints
    source_buffer: Ints
    source_offset: Ints
    target_buffer: Ints
    target_offset: Ints
    kinds: tuple[Kind, ...]
    source_buffers: tuple[BufferId, ...]
    target_buffers: tuple[BufferId, ...]

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.start)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all runs, as read at the source."""
        itemsize = np.array([kind.itemsize for kind in self.kinds], dtype=np.int64)
        return int(((self.stop - self.start) * itemsize[self.source_kind]).sum())

    def select(self, rows: Ints | slice) -> Moves:
        """Return the moves selected by a slice or an array of row numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def only(self, kinds: Collection[str]) -> Moves:
        """Return the moves of the given state kinds."""
        is_one = np.array([kind.name in kinds for kind in self.kinds], dtype=bool)
        return self.select(np.flatnonzero(is_one[self.kind]))

    def split(self, kinds: Collection[str], into: Collection[str] | None) -> tuple[Moves, Moves]:
        """Return (all other moves, the moves from buffers of `kinds` into buffers of `into`).

        into: the state kinds that are written; None for any kind.
        """
        is_apart = np.array([kind.name in kinds for kind in self.kinds], dtype=bool)[self.source_kind]
        if into is not None:
            is_apart &= np.array([kind.name in into for kind in self.kinds], dtype=bool)[self.kind]
        return self.select(np.flatnonzero(~is_apart)), self.select(np.flatnonzero(is_apart))

    def canonical(self) -> Moves:
        """Return the same moves sorted by (target, source, kind, target buffer, start), in the fewest runs.

        Runs that are adjacent on the line and in both buffers are merged. A sender and a receiver that compute the same
        moves in different ways therefore get equal arrays.
        """
        moves = self.select(np.lexsort((self.start, self.target_buffer, self.kind, self.source, self.target)))
        step = np.diff(moves.start)
        joined = moves.start[1:] == moves.stop[:-1]
        for name in ("kind", "source", "target", "source_kind", "source_buffer", "target_buffer"):
            joined &= np.diff(getattr(moves, name)) == 0
        for name in ("source_offset", "target_offset"):
            joined &= np.diff(getattr(moves, name)) == step
        first, last = chains(joined, len(moves))
        return replace(moves.select(first), stop=moves.stop[last])


def within(sides: Sides, member: int, kind: Kind, source_kind: str, wanted: Pieces, held: Pieces) -> Ints:
    """Return a table of the moves within one member, for all coordinates that are both in `wanted` and in `held`.

    The rows of the table are the fields named in `COLUMNS`.
    """
    to, out_of = wanted.intersect(held)
    columns = (
        sides.code[kind.name],
        to.start,
        to.stop,
        member,
        member,
        sides.code[source_kind],
        out_of.buffer,
        out_of.offset,
        to.buffer,
        to.offset,
    )
    return np.stack(np.broadcast_arrays(*columns))


def between(sides: Sides, kind: Kind, start: Ints, stop: Ints, sender: Ints, receiver: Ints) -> Ints:
    """Return a table of the moves from source ranks to target ranks, each of them contiguous in both buffers.

    The rows of the table are the fields named in `COLUMNS`.
    """
    source_kind = sides.read_from(kind)
    row, begin, stop, buffer, offset = sides.source(source_kind).place(start, stop, sender)
    sender, receiver = sender[row], receiver[row]
    row, start, stop, target_buffer, target_offset = sides.target(kind.name).place(begin, stop, receiver)
    members, target_members = np.array(sides.vps.members), np.array(sides.members)
    columns = (
        sides.code[kind.name],
        start,
        stop,
        members[sender[row]],
        target_members[receiver[row]],
        sides.code[source_kind],
        buffer[row],
        offset[row] + start - begin[row],
        target_buffer,
        target_offset,
    )
    return np.stack(np.broadcast_arrays(*columns))


def joined(sides: Sides, tables: Sequence[Ints], is_derived: bool = False) -> Moves:
    """Merge tables, whose rows are the fields named in `COLUMNS`, into one `Moves` object.

    is_derived: whether the moves read from target buffers.
    """
    table = np.concatenate([np.empty((len(COLUMNS), 0), np.int64), *tables], axis=1)
    columns: dict[str, Any] = dict(zip(COLUMNS, table, strict=True))
    source, target = sides.vps.buffers(sides.vps.layout), sides.vps.buffers(sides.layout)
    read = target if is_derived else source
    return Moves(**columns, kinds=sides.vps.kinds, source_buffers=read, target_buffers=target).canonical()
