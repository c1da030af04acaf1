"""What every switch is on one member, whichever way the state goes: who meets, what is measured, how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.communicators import Connections
from ds_dynatrain.adapters.world import World
from ds_dynatrain.engine import agreement
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.transaction.connecting import connect
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.errors import DynatrainError
from ds_dynatrain.space import row_of
from ds_dynatrain.transfer import TransferStats

SUMS = frozenset({"kept", "local", "sent", "late_bytes", "layers"})
"""What is added up over all members; of all else that is measured the event has the largest."""


@dataclass
class Outcome:
    """How a switch ended on this member, and what it measured. Times in milliseconds, sizes in bytes.

    certificate_ms: digests and census of both sides, without waiting for others. stats, late_stats: of the moves in the
    pause, and of those after it. late_ms: how long the latter took, digests included; late_wait_ms: how long the step
    waited in the end. pause_ms: of a late switch. layer_bytes: sent of what layers keep besides parameters.
    is_rebuilt: whether the optimizer was taken off, be it put back on. connections: to the next world's members.
    """

    committed: bool = False
    is_rebuilt: bool = False
    is_uncertain: bool = False
    """The board was lost: this member rolled back, and others may have committed."""
    reason: str = ""
    digest: str = ""
    kinds: tuple[str, ...] = ()
    stats: TransferStats | None = None
    late_stats: TransferStats | None = None
    layer_bytes: int = 0
    late_ms: float = 0.0
    late_wait_ms: float = 0.0
    pause_ms: float | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    certificate_ms: float = 0.0
    peak_memory: int = 0
    connections: Connections = field(default_factory=Connections)
    over_all: dict[str, Any] = field(default_factory=dict)
    """Over all members: bytes kept, local and sent together, of all else the longest and the most."""
    warnings: list[str] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        """This member's part of `over_all`."""
        moved = [stats for stats in (self.stats, self.late_stats) if stats is not None]
        return {
            "kept": sum(stats.bytes_in_place for stats in moved),
            "local": sum(stats.bytes_local for stats in moved),
            "sent": sum(stats.bytes_sent for stats in moved) + self.layer_bytes,
            "layers": self.layer_bytes,
            "late_bytes": self.late_stats.bytes_sent if self.late_stats else 0,
            "late_ms": self.late_ms,
            "certificate_ms": self.certificate_ms,
            "peak_memory": self.peak_memory,
            "communicators_built": self.connections.built,
            "communicators_kept": self.connections.kept,
            "connect_ms": self.connections.milliseconds,
            "connect_pause_ms": 0.0 if self.connections.is_ahead else self.connections.milliseconds,
        }


def over_all(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two parts have measured, as one."""
    sums = {name: one[name] + other[name] for name in SUMS}
    return {**sums, **{name: max(one[name], other[name]) for name in one.keys() - SUMS}}


class Meeting:
    """One member's part. source_rank, target_rank: None where it has none. old_world: None if it was idle."""

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str) -> None:
        self.engine = engine
        self.preparation = preparation
        self.proposal = preparation.proposal
        self.control: Control = preparation.board
        self.place = place
        self.outcome = Outcome()
        self.source_rank = preparation.source_rank
        self.target_rank = preparation.target_rank
        self.old_world: World | None = engine.world

    def meet(self, session: Session) -> None:
        """All are prepared, and stand at one boundary; SwitchFailed if one could not be."""
        agreement.wait_until_prepared(self.control, self.proposal, session.stop)
        agreement.meet(session, self.proposal, int(self.engine.global_steps), self.place)
        self.preparation.join()

    def connect(self, session: Session) -> None:
        """The next world's groups serve the accelerator, too, if they do not yet; see `connecting.connect`."""
        connect(self.preparation, self.old_world, session)
        self.outcome.connections = self.preparation.connections or Connections()

    def warn_of_last_gradients(self) -> None:
        """ZeRO-3, and offload in stages 1 to 3, step a parameter without a gradient with its last one; others not."""
        names, vps = self.engine.host.without_gradient, self.engine.vps
        rows = [row_of(kind.name) for kind in vps.kinds]
        offloads = any(row.is_offloaded for row in rows)
        keeping = {stage for row in rows if row.is_gradient for stage in row.stages}
        sides = {layout.zero_stage in keeping for layout in (self.proposal.source_layout, self.proposal.layout)}
        if names and len(sides) > 1:
            where = "stages 1 to 3 re-use their last gradient under CPU offload, stage 0 does"
            where = where if offloads else "stage 3 re-uses their last gradient, the other stages do"
            self.outcome.warnings.append(
                f"{len(names)} parameters got no gradient in the last step ({', '.join(names[:3])}): ZeRO {where} not, "
                "so their updates change with the stage"
            )

    def acknowledge(self, session: Session) -> None:
        """After the commit: wait for all to have read it, and learn what all have measured."""
        try:
            mine = self.outcome.measured()
            self.outcome.over_all = session.reduce("acknowledged", mine, over_all, doing="acknowledging the commit")
        except (DynatrainError, td.DistError) as missing:  # it is committed: nobody may go back
            self.outcome.warnings.append(str(missing))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.outcome.phases_ms[name] = 1e3 * (time.perf_counter() - begin)
