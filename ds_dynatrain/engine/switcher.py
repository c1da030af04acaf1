"""One member's part in switching: what is asked for, what is pending, and what happens at a boundary.

A working member comes by at every boundary; if a switch is pending and its step is reached, it takes part. An idle
member stays here, polling the board, until it works again or the job has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.device import is_accelerated, synchronize
from ds_dynatrain.engine import agreement, feasible, registration, regrouping
from ds_dynatrain.engine.agreement import Proposal, SwitchRequest
from ds_dynatrain.engine.attempts import Attempts
from ds_dynatrain.engine.changes import Changes
from ds_dynatrain.engine.checkpoints.fallback import Fallback
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.pending import PendingSwitch, Steps, SwitchEstimate
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.targets import Targets
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.plan import estimate, plan_switch
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class Reason:
    """Why a switch is asked for. cause: what asks, if not the script. predicted_gain: see `Proposal`. without: members
    that are to have no rank in it."""

    cause: str = ""
    predicted_gain: float | None = None
    without: tuple[int, ...] = ()


SCRIPT = Reason()


class Switcher:
    """Where an engine's switches come from and take place; see the module."""

    def __init__(
        self,
        engine: EngineCore,
        targets: Targets,
        attempts: Attempts,
        saver: Saver,
        fallback: Fallback,
        changes: Changes,
    ) -> None:
        self.engine, self._targets, self._attempts = engine, targets, attempts
        self._saver, self._fallback, self._changes = saver, fallback, changes
        self._steps = Steps()
        self._asked: tuple[tuple[str, int], int] = (("", 0), 0)

    # ---- asking --------------------------------------------------------------------------------------------------

    def ask(
        self,
        layout: Layout | None,
        at: int | None,
        changes: Mapping[str, Any],
        late: bool | None = None,
        reason: Reason = SCRIPT,
    ) -> PendingSwitch:
        """See `DynatrainEngine.switch`. What something else than the script has asked for gives way to the script."""
        late = self.engine.settings.late if late is None else bool(late)
        if self.engine.idle:
            raise SwitchRefused(
                "engine.switch: this member is idle and holds no shard",
                "call it on the working members, where engine.idle is false",
            )
        if self.engine.pending is not None and self._is_pending(layout, at, changes, late):
            return self.engine.pending
        PROCESS.membership.reopen(self.engine)
        request, proposal = self._request(layout, at, changes, late, reason)
        try:
            agreed = agreement.agree(
                self.engine.control, self.place_in_training(), request, self.engine.members, proposal
            )
        except (td.DistError, WorldChanged) as error:
            raise SwitchRefused(
                f"the job's key-value store does not answer: {error}", "training goes on; ask again later"
            ) from error
        if self._gives_way(reason):
            self._attempts.withdraw("the script asks for another switch, which goes first")
        self._attempts.prepare(agreed)
        self.engine.pending = PendingSwitch(agreed.layout, agreed.generation, agreed.at, late=late, cause=agreed.cause)
        return self.engine.pending

    def _gives_way(self, reason: Reason) -> bool:
        """Whether what is pending was not asked for by the script, and this is."""
        pending = self.engine.pending
        return pending is not None and bool(pending.cause) and not reason.cause

    def _is_pending(self, layout: Layout | None, at: int | None, changes: Mapping[str, Any], late: bool) -> bool:
        """Whether the very same switch was asked for before (a loop turns several times per optimizer step)."""
        try:
            target = feasible.target_layout(self.engine.layout, layout, changes)
        except SwitchRefused:
            return False
        pending, wanted = self.engine.pending, (target, at, late)
        return pending is not None and (pending.layout, pending.at, pending.late) == wanted

    def place_in_training(self) -> str:
        """Key of a request: the same on all members that ask at the same place, another one at any other place."""
        now = (self.engine.segment, self.engine.micro_steps)
        self._asked = (now, self._asked[1] + 1 if self._asked[0] == now else 1)
        return f"{now[0]}/{now[1]}/{self._asked[1]}"

    def dry_run(
        self, layout: Layout | None, changes: Mapping[str, Any], without: tuple[int, ...] = ()
    ) -> SwitchEstimate:
        """See `DynatrainEngine.plan`. without: members that are to have no rank in it."""
        engine = self.engine
        try:
            target = self._targets.checked(layout, changes)
            members = self._targets.members_for(target, without)
        except SwitchRefused as refusal:
            wanted = layout if layout is not None else engine.layout
            return SwitchEstimate(wanted, refusal=refusal.reason, way_out=refusal.way_out)
        budget = engine.settings.memory_budget_bytes
        cost = estimate(plan_switch(engine.vps, target, members), budget, self._attempts.bytes_per_second)
        figures = (cost.bytes_sent, cost.highest_peak_bytes, cost.seconds, self._attempts.bytes_per_second)
        copies = sum(extension.memory_in(target, members) for extension in engine.job.extensions)
        return SwitchEstimate(target, members, *figures, copies, self._targets.step_ms(target, members))

    def _request(
        self, layout: Layout | None, at: int | None, changes: Mapping[str, Any], late: bool, reason: Reason
    ) -> tuple[SwitchRequest, Proposal]:
        """This member's record, with its refusal if it has one, and the proposal that follows from it."""
        engine, refusal = self.engine, None
        try:
            if engine.awaits_late:
                raise SwitchRefused(self.in_the_way(), "ask again after the next engine.step()")
            target = self._targets.checked(layout, changes)
            if late:
                self._targets.check_late(target)
            gives_way = self._gives_way(reason)
            if self.engine.pending is not None and not gives_way:
                raise SwitchRefused(
                    f"a switch to {self.engine.pending.layout} is pending",
                    "ask again once engine.is_switching is false",
                )
            if self.engine.preparation is not None and not gives_way:
                raise SwitchRefused("a change of members is under way", "ask again after the next step")
            if at is not None and (isinstance(at, bool) or not isinstance(at, int)):
                raise SwitchRefused(
                    f"at={at!r} is not a whole number",
                    f"give a number of optimizer steps, from {engine.global_steps}",
                )
            if at is not None and at < engine.global_steps:
                raise SwitchRefused(f"step {at} has passed: this is step {engine.global_steps}", "give a later at=")
            members = self._targets.members_for(target, reason.without, late)
        except SwitchRefused as error:
            refusal, members = (error.reason, error.way_out), engine.members
            target = layout if isinstance(layout, Layout) else engine.layout
        request = SwitchRequest(target.to_dict(), at, engine.global_steps, refusal, late)
        places = engine.layout, engine.members, target, members, at
        why = reason.cause, reason.predicted_gain
        return request, Proposal(self.engine.attempt + 1, *places, False, late, *why)

    def register(self, groups: list[Mapping[str, Any]]) -> bool:
        """See `DynatrainEngine.update_param_groups`."""
        return regrouping.register(self.engine, self.place_in_training(), groups, self.in_the_way())

    def in_the_way(self, of_reading: bool = False) -> str:
        """Why what wants the state to itself cannot be now, in words; nothing if it can.

        of_reading: of what leaves the state as it is, and may so come before a switch that is pending.
        """
        pending = self.engine.pending
        if self.engine.awaits_late:
            return f"masters and moments of the switch to {self.engine.layout} are on their way until engine.step()"
        if pending is not None and not of_reading:
            return f"a switch to {pending.layout} is pending"
        return "an accumulation window is open" if self.engine.has_open_window else ""

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def at_boundary(self, place: str) -> None:
        """A boundary: take part in a switch that is due. An idle member returns only when it works."""
        self.engine.has_stood = True
        self.engine.control.raise_if_lost()
        self._saver.look()
        self._steps.at_boundary(PROCESS.membership.at_boundary(self.engine, place))
        PROCESS.sync_points.note()
        self._changes.look()

    def note_step(self) -> None:
        """Warn, after an optimizer step, of whatever waits for a boundary while this loop comes to none."""
        for waiting in self._steps.past_boundary(self._waiting()):
            logger.warning(
                "%s, and there was no boundary in %d optimizer steps: %s",
                *(waiting, self._steps.count, self._steps.reason),
            )

    def _waiting(self) -> Iterator[str]:
        """Yield what waits for a boundary, in words; what waits on all members, on rank 0 alone."""
        pending = self.engine.pending
        yield from self._fallback.waiting(self._steps.count)
        if self.engine.rank == 0 and pending is not None:
            yield f"a switch to {pending.layout} is pending"
        if self.engine.rank == 0 and (change := PROCESS.membership.waiting_change(self.engine)):
            yield f"a change of members waits ({change})"

    def connects_ahead(self) -> bool:
        """On a working member: whether it is to connect to the members of a switch to come now."""
        preparation = self.engine.preparation
        if preparation is None or preparation.connections is not None or not is_accelerated():
            return False
        proposal, step = preparation.proposal, self.engine.global_steps
        if preparation.connect_at is None:
            synchronize()  # the host may be ahead of its device, and so of what rank 0 has posted
            given = preparation.board, proposal, self.engine.rank, step
            preparation.connect_at = agreement.connecting_step(*given, lambda: preparation.lacks(self.engine.world))
        at = preparation.connect_at
        return at is not None and agreement.IN_THE_PAUSE < at <= step < (proposal.at or 0)

    def is_due(self, ahead: int = 1) -> bool:
        """On a working member: whether it is to take part in a switch now. ahead: see `agreement.meeting_step`."""
        if self.engine.preparation is None:
            return False
        proposal, step = self.engine.preparation.proposal, self.engine.global_steps
        if proposal.at is None:
            synchronize()  # as above
        meet = agreement.meeting_step(self.engine.preparation.board, proposal, self.engine.rank, step, ahead)
        return meet is not None and step >= meet

    def meet_idle(self, place: str) -> None:
        """On an idle member: take part in a switch that begins; let go of one that was given up."""
        if self.engine.preparation is None:
            return
        preparation, proposal = self.engine.preparation, self.engine.preparation.proposal
        if preparation.connections is None and agreement.is_connecting_ahead(self.engine.control, proposal):
            self._attempts.connect_ahead()
        elif agreement.wait_for_rank_0(self.engine.control, proposal):
            self._attempts.transact(place)
        else:
            self._see_given_up()

    def tell_changes(self) -> None:
        """On an idle member: what has changed, also where the job ends before there is work again."""
        self._changes.look()

    def pass_time(self, seconds: float) -> None:
        """An idle member's turn: the user's `on_idle`, or a short sleep."""
        on_idle = self.engine.job.on_idle
        if on_idle is not None:
            on_idle(self.engine.deepspeed)
        else:
            time.sleep(seconds)

    def look_for_proposal(self) -> None:
        """On an idle member: make ready for a switch that the working members have agreed on."""
        if self.engine.preparation is not None:
            return
        record = self.engine.control.read(f"proposal/{self.engine.attempt + 1}")
        if record is None:
            return
        registration.catch_up(self.engine)
        proposal = Proposal.from_json(record)
        if self.engine.control.member in proposal.union:
            rank = proposal.members.index(self.engine.control.member)
            self._attempts.prepare(proposal, refusal=self._attempts.rehearse(proposal.layout, rank))
            return
        outcome = self.engine.control.read(f"record/{proposal.generation}")
        if outcome is not None:
            self.engine.attempt = proposal.generation
            if outcome["commit"]:
                self.engine.layout, self.engine.members = proposal.layout, proposal.members
                PROCESS.membership.retrain(proposal.members)

    def _see_given_up(self) -> None:
        """Let go of a preparation that was given up before the meeting."""
        if self.engine.preparation is not None:
            record = self.engine.control.read(f"record/{self.engine.preparation.proposal.generation}")
            if record is not None and not record["commit"]:
                self.engine.close_preparation()
