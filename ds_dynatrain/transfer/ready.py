"""A member's part of a plan, prepared while training runs: every copy and message, between buffers known by name.

No part of it depends on addresses, so that only the copies themselves are left for the pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan import Exchange, MemberPlan, Moves
from ds_dynatrain.space import BufferId
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.transfer.batched import Batches, Batching
from ds_dynatrain.transfer.pulling import Pull, Sharing
from ds_dynatrain.transfer.regions import Places
from ds_dynatrain.transfer.series import Matrix, pairs, series
from ds_dynatrain.transfer.stream import SLOTS, Outline, Staging
from ds_dynatrain.transfer.transport import MESSAGE_BYTES

MINIMUM_BUDGET_BYTES = 64 * 1024
CHUNK_BYTES = 4 * 1024 * 1024
"""Longest staged message; all slots of both directions full are 32 MiB."""
_BUFFERS = ("kind", "source_kind", "source_buffer", "target_buffer")
"""Columns in which two moves must be equal to be parts of one copy."""


class Cast(NamedTuple):
    """A cast between target buffers, from `length` elements at each of `read` to as many at each of `written`."""

    source: tuple[str, BufferId]
    target: tuple[str, BufferId]
    read: list[int]
    written: list[int]
    length: int


@dataclass(frozen=True)
class ReadyPlan:
    """A plan with all the details that `execute` needs.

    on_host: whether no member has a buffer on an accelerator. local: places that local moves read and write. copies:
    the same as matrices. exchanges: (peer, sends, receives), of which `at_once` may be under way. derived: places that
    casts read and write, all of them in target buffers. staging: memory that is touched already, as far as it will be
    used; a slot is no longer than the longest message here. sharing, pulls: the choice of reads of accelerators'
    memory, and this member's. batching, batches: the choice of moves that go by the accelerators' library of
    collectives, and this member's. Neither pulls nor batches are in any exchange.
    """

    plan: MemberPlan
    on_host: bool
    local: tuple[Places, Places]
    copies: list[tuple[Matrix, Matrix]]
    exchanges: tuple[tuple[int, Outline, Outline], ...]
    at_once: int
    derived: tuple[Places, Places]
    casts: list[Cast]
    staging: Staging
    sharing: Sharing | None = None
    pulls: tuple[Pull, ...] = ()
    batching: Batching | None = None
    batches: Batches = field(default_factory=Batches)

    @staticmethod
    def of(
        plan: MemberPlan,
        budget_bytes: int,
        on_host: bool = True,
        sharing: Sharing | None = None,
        batching: Batching | None = None,
    ) -> ReadyPlan:
        """Prepare a plan for buffers whose addresses are not known yet.

        budget_bytes: most bytes that may be staged; TransferError if that is too little.
        """
        if budget_bytes < MINIMUM_BUDGET_BYTES:
            raise TransferError(
                f"a budget of {budget_bytes} bytes is below the least of {MINIMUM_BUDGET_BYTES}: raise it"
            )
        chunk = min(CHUNK_BYTES, budget_bytes // (2 * SLOTS))
        longest = MESSAGE_BYTES if on_host else chunk  # an accelerator's messages are all staged
        read, written = Places.of(plan.local, "source"), Places.of(plan.local, "target")
        sent, pulls = (plan, ()) if sharing is None else sharing.split(plan)
        sent, batches = (sent, Batches()) if batching is None else batching.split(sent)
        exchanges = tuple((each.peer, *_outlines(each, chunk, longest)) for each in sent.rounds)
        slot = min(chunk, max((outline.longest for _, *both in exchanges for outline in both), default=0))
        staging = Staging(slot, is_pinned=not on_host)
        at_once = max(1, budget_bytes // (2 * SLOTS * chunk))
        used = [sends.slots + receives.slots for _, sends, receives in exchanges]
        staging.reserve(max((sum(used[at : at + at_once]) for at in range(len(used))), default=0))
        return ReadyPlan(
            plan,
            on_host,
            (read, written),
            copies(read, written),
            exchanges,
            at_once,
            (Places.of(plan.derived, "source"), Places.of(plan.derived, "target")),
            _casts(plan.derived),
            staging,
            sharing,
            pulls,
            batching,
            batches,
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that go to other members, in messages of either kind or because they read them."""
        places = [*(sends.places for _, sends, _ in self.exchanges), *(pull.lent for pull in self.pulls)]
        places += [each.sends.places for each in self.batches.exchanges]
        return sum(int(each.length.sum()) for each in places)


def copies(read: Places, written: Places, rows: Ints | slice = slice(None)) -> list[tuple[Matrix, Matrix]]:
    """Return the local moves of `rows`, as pairs of matrices that are read and written."""
    sides = [(side.which[rows], side.begin[rows]) for side in (read, written)]
    return pairs(sides[0], sides[1], read.length[rows])


def _outlines(exchange: Exchange, chunk: int, longest: int) -> tuple[Outline, Outline]:
    sends, receives = Places.of(exchange.sends, "source"), Places.of(exchange.receives, "target")
    return Outline.of(sends, chunk, longest), Outline.of(receives, chunk, longest)


def _casts(moves: Moves) -> list[Cast]:
    """Return the casts in order; casts at equal steps are joined to one."""
    first, length = _neighbors(moves)
    source, written = moves.source_offset[first], moves.target_offset[first]
    same = np.zeros(len(first), dtype=np.int64)
    for column in (*(getattr(moves, name)[first] for name in _BUFFERS), length):
        same = same * (int(column.max(initial=0)) + 1) + column
    found = []
    for row, count in zip(*(column.tolist() for column in series(same, source, written)), strict=True):
        at, rows = int(first[row]), slice(row, row + count)
        read = moves.kinds[moves.source_kind[at]].name, moves.source_buffers[moves.source_buffer[at]]
        into = moves.kinds[moves.kind[at]].name, moves.target_buffers[moves.target_buffer[at]]
        found.append(Cast(read, into, source[rows].tolist(), written[rows].tolist(), int(length[row])))
    return found


def _neighbors(moves: Moves) -> tuple[Ints, Ints]:
    """Return (first row, elements) of rows that follow one another in both buffers, wherever they lie on the line."""
    if not len(moves):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    length = moves.stop - moves.start
    joined = np.ones(len(moves) - 1, dtype=bool)
    for name in _BUFFERS:
        joined &= np.diff(getattr(moves, name)) == 0
    for name in ("source_offset", "target_offset"):
        joined &= np.diff(getattr(moves, name)) == length[:-1]
    first = np.flatnonzero(np.append(True, ~joined))
    return first, np.add.reduceat(length, first)
