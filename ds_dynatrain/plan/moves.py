"""Moves, which copy runs of coordinates from one member's buffers into another's, and the moves that a member needs.

Local before derived before remote: bytes that the member holds are copied (or are in place already); a weight is cast
from the master that the rank has after the switch, and a master is never sent for that alone; the rest is received,
each element once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_dynatrain.plan.sides import Sides, read_from, receivers_of, senders_of
from ds_dynatrain.space import ABSENT, BufferId, Kind, Pieces
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
    """Runs to copy, as int64 arrays of one length.

    kind, source_kind: index into `kinds`. start, stop: coordinates. source, target: members. source_buffer,
    target_buffer: index into `source_buffers`, `target_buffers`; source_offset, target_offset: elements into them.
    The bytes that move are those of `source_kind`; they differ from `kind` in size only where a weight is cast from
    its master.
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

    @classmethod
    def empty(
        cls, kinds: tuple[Kind, ...], source_buffers: tuple[BufferId, ...], target_buffers: tuple[BufferId, ...]
    ) -> Moves:
        """Return no moves, with these tables."""
        columns = {name: np.empty(0, np.int64) for name in COLUMNS}
        return cls(kinds=kinds, source_buffers=source_buffers, target_buffers=target_buffers, **columns)

    @classmethod
    def concatenate(cls, parts: Iterable[Moves], default: Moves) -> Moves:
        """Put moves one after another; all share the tables of `default`, which is returned if there are none."""
        filled = [part for part in parts if len(part)]
        if not filled:
            return default
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in filled]) for name in COLUMNS}
        return replace(default, **columns)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.start)

    @property
    def itemsize(self) -> Ints:
        """Bytes of an element of each run, as it is read."""
        return np.array([kind.itemsize for kind in self.kinds], dtype=np.int64)[self.source_kind]

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, as they are read."""
        return int(((self.stop - self.start) * self.itemsize).sum())

    def select(self, rows: Ints | slice) -> Moves:
        """Return the moves at a slice or array of row numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def only(self, kinds: Collection[str]) -> Moves:
        """Return the moves of some kinds."""
        is_one = np.array([kind.name in kinds for kind in self.kinds], dtype=bool)
        return self.select(np.flatnonzero(is_one[self.kind]))

    def cut(self, row: Ints, start: Ints, stop: Ints) -> Moves:
        """Return the parts [start[i], stop[i]) of the moves row[i], with the offsets of the parts."""
        chosen = self.select(row)
        step = start - chosen.start
        return replace(
            chosen,
            start=start,
            stop=stop,
            source_offset=chosen.source_offset + step,
            target_offset=chosen.target_offset + step,
        )

    def canonical(self) -> Moves:
        """Return the same elements sorted by (target, source, kind, target buffer, start), in the fewest runs.

        Runs that are neighbors on the line and in both buffers become one. Two members that reach the same elements in
        different ways get the same arrays: a sender's list equals its receiver's.
        """
        moves = self.select(np.lexsort((self.start, self.target_buffer, self.kind, self.source, self.target)))
        step = np.diff(moves.start)
        joined = moves.start[1:] == moves.stop[:-1]
        for name in ("kind", "source", "target", "source_kind", "source_buffer", "target_buffer"):
            joined &= np.diff(getattr(moves, name)) == 0
        for name in ("source_offset", "target_offset"):
            joined &= np.diff(getattr(moves, name)) == step
        first, last = chains(joined, len(moves))
        return moves.cut(first, moves.start[first], moves.stop[last])


def at_home(sides: Sides, member: int) -> tuple[Moves, Moves]:
    """Return the local and the derived moves of a member.

    Derived moves read the member's target buffers, after everything else has arrived: they cast from another kind.
    """
    nothing = no_moves(sides)
    after = Moves.empty(sides.vps.kinds, nothing.target_buffers, nothing.target_buffers)
    rank = sides.target_rank.get(member, ABSENT)
    if rank == ABSENT:
        return nothing, after
    local: list[Moves] = []
    derived: list[Moves] = []
    source_rank = sides.source_rank.get(member, ABSENT)
    for kind in sides.kinds:
        want = sides.target(kind.name).holding(rank)
        for name, held in sides.held(kind, source_rank):
            local.append(_pair(sides, member, kind, want, name, held))
            want = want.subtract(held.start, held.stop)
        origin = sides.derived_from(kind)
        if origin is not None:
            derived.append(_pair(sides, member, kind, want, origin, sides.target(origin).holding(rank)))
    return (
        Moves.concatenate(local, nothing).canonical(),
        Moves.concatenate(derived, after).canonical(),
    )


def receives(sides: Sides, member: int) -> Moves:
    """Return all moves into a member from others, sorted by sender, kind and start."""
    rank = sides.target_rank.get(member, ABSENT)
    if rank == ABSENT:
        return no_moves(sides)
    parts = []
    for kind in sides.kinds:
        start, stop = sides.wanted(kind, rank, sides.source_rank.get(member, ABSENT))
        if len(start):
            low, high, sender = senders_of(sides, kind, rank, start, stop)
            parts.append(_between(sides, kind, low, high, sender, np.full_like(sender, rank)))
    return Moves.concatenate(parts, no_moves(sides)).canonical()


def sends(sides: Sides, member: int) -> Moves:
    """Return all moves from a member to others, sorted by receiver, kind and start."""
    sender = sides.source_rank.get(member, ABSENT)
    if sender == ABSENT:
        return no_moves(sides)
    parts = []
    for kind in sides.kinds:
        start, stop, rank = receivers_of(sides, kind, sender)
        if len(start):
            parts.append(_between(sides, kind, start, stop, np.full_like(rank, sender), rank))
    return Moves.concatenate(parts, no_moves(sides)).canonical()


def no_moves(sides: Sides) -> Moves:
    """Return no moves, with the buffer tables of both sides."""
    source, target = sides.vps.buffers(sides.vps.layout), sides.vps.buffers(sides.layout)
    return Moves.empty(sides.vps.kinds, source, target)


def _pair(sides: Sides, member: int, kind: Kind, want: Pieces, source_kind: str, held: Pieces) -> Moves:
    """Return copies within one member of the coordinates that `want` and `held` share."""
    to, out_of = want.intersect(held)
    same = np.full(len(to), member, dtype=np.int64)
    return Moves(
        np.full(len(to), _code(sides, kind.name)),
        to.start,
        to.stop,
        same,
        same,
        np.full(len(to), _code(sides, source_kind)),
        out_of.buffer,
        out_of.offset,
        to.buffer,
        to.offset,
        sides.vps.kinds,
        held.buffers,
        want.buffers,
    )


def _between(sides: Sides, kind: Kind, start: Ints, stop: Ints, sender: Ints, receiver: Ints) -> Moves:
    """Return moves of runs from source ranks to target ranks, cut where an address changes on either side."""
    source_kind = read_from(sides, kind)
    row, start, stop, _, _ = sides.source(source_kind).place(start, stop, sender)
    sender, receiver = sender[row], receiver[row]
    row, start, stop, target_buffer, target_offset = sides.target(kind.name).place(start, stop, receiver)
    sender, receiver = sender[row], receiver[row]
    _, _, _, source_buffer, source_offset = sides.source(source_kind).place(start, stop, sender)
    return Moves(
        np.full(len(start), _code(sides, kind.name)),
        start,
        stop,
        np.array(sides.vps.members, dtype=np.int64)[sender],
        np.array(sides.members, dtype=np.int64)[receiver],
        np.full(len(start), _code(sides, source_kind)),
        source_buffer,
        source_offset,
        target_buffer,
        target_offset,
        sides.vps.kinds,
        sides.vps.buffers(sides.vps.layout),
        sides.vps.buffers(sides.layout),
    )


def _code(sides: Sides, kind: str) -> int:
    return [other.name for other in sides.vps.kinds].index(kind)
