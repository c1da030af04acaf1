"""Preparation of a member's plan while training runs: all copies and messages, between buffers known by name.

Nothing here depends on addresses, so only the copies themselves remain to be done during the pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan import Exchange, MemberPlan, split
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
class Phase:
    """The exchanges of a member that do not wait for each other.

    exchanges: (peer, sent messages, received messages), excluding the moves in `pulls` and `batches`.
    pulls: this member's reads of other members' accelerator memory.
    batches: this member's batches of moves through the collectives library.
    """

    exchanges: list[tuple[int, MessageOutline, MessageOutline]]
    pulls: list[Pull]
    batches: Batches

    @staticmethod
    def of(
        exchanges: Sequence[Exchange],
        chunk: int,
        longest: int,
        sharing: Sharing | None,
        batching: Batching | None,
        is_relayed: bool = False,
    ) -> Phase:
        """Prepare exchanges.

        chunk, longest: as in `MessageOutline.of`.
        is_relayed: whether they read target buffers.
        """
        pulls, batches = list[Exchange](), list[Exchange]()
        if sharing is not None:
            exchanges, pulls = split(exchanges, sharing.members, sharing.after if is_relayed else sharing.kinds)
        if batching is not None:
            exchanges, batches = split(exchanges, batching.members, batching.kinds, batching.kinds)
        outlines = []
        for each in exchanges:
            sends = MessageOutline.of(MoveRegions.of(each.sends, "source"), chunk, longest)
            outlines.append(
                (each.peer, sends, MessageOutline.of(MoveRegions.of(each.receives, "target"), chunk, longest))
            )
        found = () if batching is None else (Bundles.of(each, batching.bundle_bytes) for each in batches)
        return Phase(outlines, [Pull.of(each) for each in pulls], Batches.of(found))


@dataclass(frozen=True)
class ReadyPlan:
    """A member's plan with all the details that `execute` needs.

    plan: the member's plan.
    on_host: whether all buffers of all members are in host memory.
    local: regions that local moves read, and regions that they write.
    copies: the local moves as pairs of matrices of bytes.
    phases: the rounds, which read source buffers; and the relays, if there are any, which read target buffers.
    at_once: number of exchanges that may run at the same time.
    derived: regions that casts read, and regions that they write; all of them are in target buffers.
    casts: the casts as pairs of matrices of elements.
    staging: memory for packed messages, already touched.
    bytes_sent: bytes that reach other members in any way.
    sharing: the settings for reads of other members' accelerator memory.
    """

    plan: MemberPlan
    on_host: bool
    local: tuple[MoveRegions, MoveRegions]
    copies: list[tuple[Matrix, Matrix]]
    phases: list[Phase]
    at_once: int
    derived: tuple[MoveRegions, MoveRegions]
    casts: list[tuple[Matrix, Matrix]]
    staging: Staging
    bytes_sent: int
    sharing: Sharing | None

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
        batching: the settings for moves through the collectives library.

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
        phases = [Phase.of(plan.rounds, chunk, longest, sharing, batching)]
        if plan.relays:
            phases.append(Phase.of(plan.relays, chunk, longest, sharing, batching, is_relayed=True))
        slot, slots, at_once = 0, 0, max(1, budget_bytes // (2 * SLOTS * chunk))
        for phase in phases:
            used = [sends.slots + receives.slots for _, sends, receives in phase.exchanges]
            slots = max([slots, *(sum(used[at : at + at_once]) for at in range(len(used)))])
            slot = max([slot, *(outline.longest for _, *both in phase.exchanges for outline in both)])
        staging = Staging(min(chunk, slot), is_pinned=not on_host)
        staging.reserve(slots)
        bytes_sent = sum(each.sends.nbytes for each in plan.exchanges)
        return ReadyPlan(
            plan,
            on_host,
            local,
            pairs(*local),
            phases,
            at_once,
            derived,
            _casts(*derived),
            staging,
            bytes_sent,
            sharing,
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
