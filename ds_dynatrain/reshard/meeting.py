"""Steps that all switches share: members meet, connect the next world, record measurements and acknowledge the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_at_boundary
from ds_dynatrain.adapters.groups.communicators import Connections
from ds_dynatrain.adapters.groups.device import is_accelerated, synchronize
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.zero.regroup import refuse_changes
from ds_dynatrain.errors import DynatrainError
from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.proposal import CONNECTING, Proposal
from ds_dynatrain.membership.session import Session, VoteResult
from ds_dynatrain.plan import Assignment, Cost
from ds_dynatrain.reshard.census import check_census
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.old_state import ACKNOWLEDGED
from ds_dynatrain.reshard.preparation import Preparation
from ds_dynatrain.reshard.swap import Before
from ds_dynatrain.space import row_of
from ds_dynatrain.transfer import TransferStats

NO_MOVES = TransferStats(0, 0, 0, 0, 0.0, 0.0, 0.0)
SUMS = frozenset({"kept", "local", "sent", "planned", "late_bytes"})
"""Names of measurements that are summed over all members; for all others the event has the maximum."""

UNKNOWN = -1
"""Measurement that this member has not made."""


@dataclass
class Outcome:
    """The end of a switch on this member, and its measurements. Times are in milliseconds, sizes in bytes.

    is_rebuilt: whether the optimizer was detached, even if it was attached again.
    stats: statistics of the moves in the pause.
    late_stats: statistics of the moves after the pause.
    cost: what this member's part of the plan costs.
    best: on rank 0, the assignment of members to ranks that moves the fewest bytes, if it was computed.
    layer_bytes: bytes sent to transfer what layers keep besides parameters.
    late_ms: duration of the moves after the pause, digests included.
    late_wait_ms: how long the optimizer step had to wait for these moves.
    pause_ms: duration of the pause of a late switch; None for any other.
    certificate_ms: time spent on the digests and the census of both sides, excluding waits for other members.
    connections: the connections to the next world's members.
    """

    committed: bool = False
    is_rebuilt: bool = False
    is_uncertain: bool = False
    """Whether the board was lost, so that this member rolled back while others may have committed."""
    reason: str = ""
    digest: str = ""
    kinds: tuple[str, ...] = ()
    stats: TransferStats | None = None
    late_stats: TransferStats | None = None
    cost: Cost = field(default_factory=Cost)
    best: Assignment | None = None
    layer_bytes: int = 0
    late_ms: float = 0.0
    late_wait_ms: float = 0.0
    pause_ms: float | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    certificate_ms: float = 0.0
    peak_memory: int = 0
    connections: Connections = field(default_factory=Connections)
    over_all: dict[str, Any] = field(default_factory=dict)
    """Measurements over all members: sums of bytes kept, copied locally and sent; the maximum of all others."""
    warnings: list[str] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        """Return this member's measurements, as a record for `over_all`."""
        now, late = self.stats or NO_MOVES, self.late_stats or NO_MOVES
        return {
            "kept": now.bytes_in_place + late.bytes_in_place,
            "local": now.bytes_local + late.bytes_local,
            "sent": now.bytes_sent + late.bytes_sent + self.layer_bytes,
            "planned": self.cost.bytes_sent + self.layer_bytes,
            "bound": UNKNOWN if self.best is None else self.best.bytes_bound,
            "rank_zero": UNKNOWN if self.best is None else self.best.rank_zero_bytes,
            "busiest": self.cost.bytes_busiest,
            "memory_bound": self.cost.highest_peak_bytes,
            "move_ms": self.phases_ms.get("move", 0.0) + self.late_ms,
            "late_bytes": late.bytes_sent,
            "late_ms": self.late_ms,
            "certificate_ms": self.certificate_ms,
            "peak_memory": self.peak_memory,
            "communicators_built": self.connections.built,
            "communicators_kept": self.connections.kept,
            "connect_ms": self.connections.milliseconds,
            "connect_pause_ms": 0.0 if self.connections.is_ahead else self.connections.milliseconds,
        }

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that records the duration of its block as that of phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases_ms[name] = 1e3 * (time.perf_counter() - begin)

    def acknowledge(self, session: Session) -> bool:
        """Wait until all members have read the commit, and collect their measurements in `over_all`.

        Return whether all members have read it. A missing member only causes a warning, because the switch can no
        longer be undone.
        """
        try:
            self.over_all = session.reduce(ACKNOWLEDGED, self.measured(), over_all, doing="acknowledging the commit")
        except (DynatrainError, td.DistError) as missing:
            self.warnings.append(str(missing))
        return bool(self.over_all)


def over_all(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the measurements of two groups of members."""
    return {name: (mine + other[name]) if name in SUMS else max(mine, other[name]) for name, mine in one.items()}


def meet(session: Session, engine: EngineCore, preparation: Preparation, place: str, carry: Any = None) -> Any:
    """Wait until all members are prepared and have reached the same boundary; return the carry of rank 0.

    carry: on rank 0, a record for all other members.

    Raises SwitchFailed if a member could not be prepared.
    """
    agreement.wait_until_prepared(preparation.board, preparation.proposal, session.stop)
    carry = agreement.meet(session, preparation.proposal, int(engine.global_steps), place, carry)
    preparation.join()
    return carry


def drain(engine: EngineCore, proposal: Proposal, rank: int, outcome: Outcome) -> Before:
    """Return a working member's state, after checking that no global batch is open and every element is in its place.

    Raises SwitchRefused if a global batch is open or the registered parameters have changed, and CensusError if an
    element is not where the layout predicts it.
    """
    refuse_at_boundary(engine.host)
    refuse_changes(engine.host)
    before = Before.of(engine)
    check_census(engine.host, engine.vps, rank, before.buffers, "before the moves")
    if engine.host.without_gradient:
        outcome.warnings += last_gradients_warning(engine, proposal)
    return before


def last_gradients_warning(engine: EngineCore, proposal: Proposal) -> list[str]:
    """Return a warning if parameters without a gradient are updated differently before and after the switch.

    ZeRO-3, and CPU offload in stages 1 to 3, update such a parameter with its last gradient; other stages do not.
    """
    names, vps = engine.host.without_gradient, engine.vps
    rows = [row_of(kind.name) for kind in vps.kinds]
    offloads = any(row.is_offloaded for row in rows)
    keeping = {stage for row in rows if row.is_gradient for stage in row.stages}
    if len({layout.zero_stage in keeping for layout in (proposal.source_layout, proposal.layout)}) == 1:
        return []
    where = "stages 1 to 3 re-use their last gradient under CPU offload, stage 0 does"
    where = where if offloads else "stage 3 re-uses their last gradient, the other stages do"
    return [
        f"{len(names)} parameters got no gradient in the last step ({', '.join(names[:3])}): ZeRO {where} not, "
        "so their updates change with the stage"
    ]


def connect(preparation: Preparation, old_world: World | None, session: Session) -> None:
    """Connect the next world's groups over the accelerator, while all members wait and no device work is in progress.

    Called on all members of either world. Does nothing without an accelerator, or if the groups are connected already.

    Raises MemberMissing if a member does not arrive, and RuntimeError if connecting does not succeed within the
    time-out. Connections made so far are closed together with the preparation.
    """
    world = preparation.world
    if not is_accelerated() or world is None or preparation.connections is not None:
        return
    synchronize()
    session.reduce(CONNECTING, None, _nothing, doing="connecting the next world's members")
    preparation.connections = world.connect(preparation.board.timeout_seconds, old_world, session.stop)


def connect_ahead(preparation: Preparation, old_world: World | None) -> VoteResult:
    """Connect the next world's groups at an earlier boundary than that of the switch; return all members' decision.

    If the decision is a no, the switch cannot happen; members have changed nothing else. Raises OutcomeUnknown if the
    board is lost.
    """
    board, proposal = preparation.board, preparation.proposal
    what = f"connecting for the switch to {proposal.layout}"
    session = Session(board, proposal.ahead_key, proposal.union, what, stop=preparation.stop)

    def work() -> None:
        preparation.join()
        connect(preparation, old_world, session)

    decision = session.vote(work)
    if decision.commit and preparation.connections is not None:
        preparation.connections = replace(preparation.connections, is_ahead=True)
    elif session.is_first and not decision.commit:  # members that take no part in the vote read this record
        board.decide(f"record/{proposal.generation}", {"commit": False, "reason": decision.reason})
    return decision


def _nothing(one: None, other: None) -> None:
    """Merge two empty reports; all that matters is that every member has arrived."""
