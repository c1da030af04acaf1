"""What a member needs for its target rank, by where it comes from: local, derived, or remote.

Local before derived before remote: bytes that the member holds are copied (or are in place); a weight is cast from the
master that the rank has after the switch, which is never sent for that alone; the rest is received, each element once.
"""

from __future__ import annotations

import numpy as np

from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.senders import read_from, receivers_of, senders_of
from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import ABSENT, Kind, Pieces
from ds_dynatrain.space.tensor import Ints


def at_home(sides: Sides, member: int) -> tuple[Moves, Moves]:
    """The local and the derived moves of a member.

    Derived moves read the member's target buffers, after all else has arrived: they cast from another kind.
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
    """All that a member receives, sorted by sender, kind and start."""
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
    """All that a member sends, sorted by receiver, kind and start."""
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
    """No move, with the buffer tables of both sides."""
    source, target = sides.vps.buffers(sides.vps.layout), sides.vps.buffers(sides.layout)
    return Moves.empty(sides.vps.kinds, source, target)


def _pair(sides: Sides, member: int, kind: Kind, want: Pieces, source_kind: str, held: Pieces) -> Moves:
    """Copies within one member of what `want` and `held` share."""
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
    """Moves of runs from source ranks to target ranks, cut where an address changes on either side."""
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
