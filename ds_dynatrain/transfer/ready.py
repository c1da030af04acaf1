"""Preparation of a member's plan while training runs: all copies and messages, between buffers known by name.

Nothing here depends on addresses, so only the copies themselves remain to be done during the pause.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan import MemberPlan
from ds_dynatrain.transfer.batched import Batches, Batching, Bundles
from ds_dynatrain.transfer.pulling import Pull, Sharing
from ds_dynatrain.transfer.regions import MoveRegions, pairs
from ds_dynatrain.transfer.series import Matrix
from ds_dynatrain.transfer.stream import SLOTS, MessageOutline, Staging
from ds_dynatrain.transfer.transport import MESSAGE_BYTES

MINIMUM_BUDGET_BYTES = 64 * 1024
CHUNK_BYTES = 4 * 1024 * 1024
"""Longest staged message, in bytes; with all slots of both directions in use, staging takes 32 MiB."""


@dataclass(frozen=True)
class ReadyPlan:
    """A member's plan with all the details that `execute` needs.

    plan: the member's plan.
    on_host: whether all buffers of all members are in host memory.
    local: regions that local moves read, and regions that they write.
    copies: the local moves as pairs of matrices of bytes.
    exchanges: (peer, sent messages, received messages), excluding the moves in `pulls` and `batches`.
    at_once: number of exchanges that may run at the same time.
    derived: regions that casts read, and regions that they write; all of them are in target buffers.
    casts: the casts as pairs of matrices of elements.
    staging: memory for packed messages, already touched.
    bytes_sent: bytes that reach other members in any way.
    sharing: the settings for reads of other members' accelerator memory.
    pulls: this member's reads of such memory.
    batching: the settings for moves through the collectives library.
    batches: this member's batches of such moves.
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

        budget_bytes: most bytes of staging memory.

        The other arguments are fields of this class. Raises TransferError if the budget is too small.
        """
        if budget_bytes < MINIMUM_BUDGET_BYTES:
            raise TransferError(
                f"a budget of {budget_bytes} bytes is below the least of {MINIMUM_BUDGET_BYTES}: raise it"
            )
        chunk = min(CHUNK_BYTES, budget_bytes // (2 * SLOTS))
        longest = MESSAGE_BYTES if on_host else chunk  # all messages of an accelerator are staged
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
            pairs(*local),
            exchanges,
            at_once,
            derived,
            _casts(*derived),
            staging,
            bytes_sent,
            sharing,
            pulls,
            batching,
            batches,
        )


def _casts(read: MoveRegions, written: MoveRegions) -> list[tuple[Matrix, Matrix]]:
    """Return casts as pairs of matrices (read, written) of elements."""
    found = list[tuple[Matrix, Matrix]]()
    for each in pairs(read, written):
        sizes = read.keys[each[0].which][2], written.keys[each[1].which][2]
        mine, others = (
            matrix._replace(begin=matrix.begin // size, step=matrix.step // size, length=matrix.length // size)
            for matrix, size in zip(each, sizes, strict=True)
        )
        found.append((mine, others))
    return found
