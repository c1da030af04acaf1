"""What every switch is on one member, whichever way the state goes: who meets, what is measured, how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.worlds import World
from ds_dynatrain.engine import agreement
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.errors import MemberMissing, SwitchFailed, WorldChanged
from ds_dynatrain.space import HOST_GRAD, STALE_GRAD
from ds_dynatrain.transfer import TransferStats


@dataclass
class Outcome:
    """How a switch ended on this member, and what it measured. Times in milliseconds, sizes in bytes.

    certificate_ms: digests and census of both sides, without waiting for others.
    is_rebuilt: whether the optimizer was taken off, be it put back on. members: what each one measured.
    """

    committed: bool = False
    is_rebuilt: bool = False
    is_uncertain: bool = False
    """The notice board was lost: this member rolled back, and others may have committed."""
    reason: str = ""
    digest: str = ""
    kinds: tuple[str, ...] = ()
    stats: TransferStats | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    certificate_ms: float = 0.0
    peak_memory: int = 0
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Meeting:
    """One member's part. source_rank, target_rank: None where it has none. old_world: None if it was idle."""

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str) -> None:
        self.engine = engine
        self.preparation = preparation
        self.proposal = preparation.proposal
        self.control: Control = preparation.board
        self.place = place
        self.outcome = Outcome()
        mine, members = self.control.member, self.proposal.source_members
        self.source_rank = members.index(mine) if mine in members else None
        self.target_rank = preparation.target_rank
        self.old_world: World | None = engine.world

    def meet(self, stop: Callable[[], None]) -> None:
        """All are prepared, and stand at one boundary; SwitchFailed if one could not be. stop: called while waiting."""
        generation = self.proposal.generation
        prepared = self.control.gather(f"prepared/{generation}", self.proposal.union, "preparing the switch", stop=stop)
        failed = [f"member {member}: {record['error']}" for member, record in prepared.items() if record["error"]]
        if failed:
            raise SwitchFailed(f"it could not be prepared on {'; '.join(failed)}")
        agreement.stand(self.control, self.proposal, self.engine.global_steps, self.place, stop)
        self.preparation.join()

    def warn_of_last_gradients(self) -> None:
        """ZeRO-3, and offload in stages 1 to 3, step a parameter without a gradient with its last one; others not."""
        names, vps = self.engine.host.without_gradient, self.engine.vps
        offloads = any(kind.name == HOST_GRAD for kind in vps.kinds)
        kept = HOST_GRAD if offloads else STALE_GRAD
        sides = {vps.is_held(layout, kept) for layout in (self.proposal.source_layout, self.proposal.layout)}
        if names and len(sides) > 1:
            where = "stages 1 to 3 re-use their last gradient under CPU offload, stage 0 does"
            where = where if offloads else "stage 3 re-uses their last gradient, the other stages do"
            self.outcome.warnings.append(
                f"{len(names)} parameters got no gradient in the last step ({', '.join(names[:3])}): ZeRO {where} not, "
                "so their updates change with the stage"
            )

    def acknowledge(self, measured: dict[str, Any]) -> None:
        """After the commit: wait for all to have read it, and keep what each has measured."""
        key = f"acknowledged/{self.proposal.generation}"
        try:
            self.control.post(f"{key}/{self.control.member}", measured)
            self.outcome.members = self.control.gather(
                key, self.proposal.union, "acknowledging the commit", stop=self.preparation.stop
            )
        except (MemberMissing, WorldChanged, td.DistError) as missing:  # it is committed: nobody may go back
            self.outcome.warnings.append(str(missing))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.outcome.phases_ms[name] = 1e3 * (time.perf_counter() - begin)
