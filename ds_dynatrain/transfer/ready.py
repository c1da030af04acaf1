"""A member's part of a plan, prepared while training runs: every copy and message, between buffers known by name.

No part of it depends on addresses, so that only the copies themselves are left for the pause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan import MemberPlan, Moves
from ds_dynatrain.space.interval import Ints, chains
from ds_dynatrain.transfer.batched import Batches, Batching, Bundles
from ds_dynatrain.transfer.pulling import Pull, Sharing
from ds_dynatrain.transfer.regions import MoveRegions
from ds_dynatrain.transfer.series import Matrix, pairs
from ds_dynatrain.transfer.stream import SLOTS, MessageOutline, Staging
from ds_dynatrain.transfer.transport import MESSAGE_BYTES

MINIMUM_BUDGET_BYTES = 64 * 1024
CHUNK_BYTES = 4 * 1024 * 1024
"""Longest staged message; all slots of both directions full are 32 MiB."""


@dataclass(frozen=True)
class ReadyPlan:
    """A plan with all the details that `execute` needs.

    on_host: whether no member has a buffer on an accelerator. local: places that local moves read and write. copies:
    the same as matrices. exchanges: (peer, sends, receives), of which `at_once` may be under way. derived: places that
    casts read and write, all of them in target buffers. casts: the same as matrices, in elements. staging: memory that
    is touched already, as far as it will be used; a slot is no longer than the longest message here. bytes_sent: bytes
    that go to other members, in messages of either kind or because they read them. sharing, pulls: the choice of reads
    of accelerators' memory, and this member's. batching, batches: the choice of moves that go by the accelerators'
    library of collectives, and this member's. Neither pulls nor batches are in any exchange.
    """

    plan: MemberPlan
    on_host: bool
    local: tuple[MoveRegions, MoveRegions]
    copies: list[tuple[Matrix, Matrix]]
    exchanges: list[tuple[int, MessageOutline, MessageOutline]]
    at_once: int
    derived: tuple[MoveRegions, MoveRegions]
    casts: list[tuple[Matrix, Matrix]]
    staging: Staging
    bytes_sent: int
    sharing: Sharing | None
    pulls: list[Pull]
    batching: Batching | None
    batches: Batches

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
        local = MoveRegions.of(plan.local, "source"), MoveRegions.of(plan.local, "target")
        derived = MoveRegions.of(plan.derived, "source"), MoveRegions.of(plan.derived, "target")
        sent, pulls, batches = plan, list[Pull](), Batches()
        if sharing is not None:
            sent, apart = sent.split(sharing.members, sharing.kinds)
            pulls = [Pull.of(each) for each in apart]
        if batching is not None:
            sent, apart = sent.split(batching.members, batching.kinds, batching.kinds)
            batches = Batches.of(Bundles.of(each, batching.bundle_bytes) for each in apart)
        exchanges, slot, used, bytes_sent = list[tuple[int, MessageOutline, MessageOutline]](), 0, list[int](), 0
        for each in sent.rounds:
            sends = MessageOutline.of(MoveRegions.of(each.sends, "source"), chunk, longest)
            receives = MessageOutline.of(MoveRegions.of(each.receives, "target"), chunk, longest)
            exchanges.append((each.peer, sends, receives))
            slot = max(slot, sends.longest, receives.longest)
            used.append(sends.slots + receives.slots)
        for each in plan.rounds:
            bytes_sent += each.sends.nbytes
        staging, slots = Staging(min(chunk, slot), is_pinned=not on_host), 0
        at_once = max(1, budget_bytes // (2 * SLOTS * chunk))
        for at in range(len(used)):
            slots = max(slots, sum(used[at : at + at_once]))
        staging.reserve(slots)
        return ReadyPlan(
            plan,
            on_host,
            local,
            copies(*local),
            exchanges,
            at_once,
            derived,
            _casts(plan.derived, *derived),
            staging,
            bytes_sent,
            sharing,
            pulls,
            batching,
            batches,
        )


def copies(read: MoveRegions, written: MoveRegions, rows: Ints | slice = slice(None)) -> list[tuple[Matrix, Matrix]]:
    """Return the local moves of `rows`, as pairs of matrices that are read and written."""
    mine, others = (read.which[rows], read.begin[rows]), (written.which[rows], written.begin[rows])
    return pairs(mine, others, read.length[rows])


def _casts(moves: Moves, read: MoveRegions, written: MoveRegions) -> list[tuple[Matrix, Matrix]]:
    """Return the casts as pairs of matrices of elements.

    Runs that follow one another in both buffers are joined, wherever they lie on the line.
    """
    length = moves.stop - moves.start
    joined = (np.diff(read.which) == 0) & (np.diff(written.which) == 0)
    for offset in (moves.source_offset, moves.target_offset):
        joined &= np.diff(offset) == length[:-1]
    first, last = chains(joined, len(moves))
    end = np.cumsum(length)
    mine = read.which[first], moves.source_offset[first]
    others = written.which[first], moves.target_offset[first]
    return pairs(mine, others, end[last] - end[first] + length[first])
