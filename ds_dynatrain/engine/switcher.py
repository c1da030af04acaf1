"""One member's part in switching: what is asked for, what is pending, and what happens at a boundary.

A working member comes by at every boundary; if a switch is pending and its step is reached, it takes part. An idle
member stays here, polling the notice board, until it works again or the job has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as td

from ds_dynatrain.engine import agreement, feasible, registration
from ds_dynatrain.engine.agreement import Proposal, Wish
from ds_dynatrain.engine.attempts import Attempts
from ds_dynatrain.engine.checkpoints import restore, stock
from ds_dynatrain.engine.checkpoints.restoration import Restored
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.plan import estimate, plan_switch
from ds_dynatrain.space import Layout, is_partitioned

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine

OnIdle = Callable[["DynatrainEngine"], object]


class Switcher(Attempts):
    """The switching half of an engine."""

    def __init__(self, engine: DynatrainEngine, on_idle: OnIdle | None) -> None:
        super().__init__(engine)
        self._on_idle = on_idle
        self._asked: tuple[tuple[str, int], int] = (("", 0), 0)
        self._loads: tuple[int, int] = (0, 0)

    @property
    def control(self) -> Control:
        """The notice board of the present generation."""
        return self.engine.control

    @property
    def era(self) -> str:
        """A stretch of training in which no step comes twice. Keys of what working members do together begin with it.

        It is the same on all of them, which `attempt` is not while a change of members is being prepared.
        """
        generation, count = self._loads
        return f"{self.engine.generation}.{count if generation == self.engine.generation else 0}"

    # ---- asking --------------------------------------------------------------------------------------------------

    def ask(self, layout: Layout | None, at: int | None, changes: dict[str, int]) -> PendingSwitch:
        """See `DynatrainEngine.switch`."""
        if self.engine.idle:
            raise SwitchRefused("this member is idle and holds no shard", "call it on the working members")
        if self._pending is not None and self._is_pending(layout, at, changes):
            return self._pending
        self.engine.membership.reopen(self.engine)
        wish, proposal = self._wish(layout, at, changes)
        try:
            agreed = agreement.agree(self.control, self._place_in_training(), wish, self.engine.members, proposal)
        except (td.DistError, WorldChanged) as error:
            raise SwitchRefused(f"the notice board is gone: {error}", "ask again later") from error
        self.prepare(agreed)
        self._pending = PendingSwitch(agreed.layout, agreed.generation, agreed.at)
        return self._pending

    def _is_pending(self, layout: Layout | None, at: int | None, changes: dict[str, int]) -> bool:
        """Whether the very same switch was asked for before (a loop turns several times per optimizer step)."""
        try:
            target = feasible.target_layout(self.engine.layout, layout, changes)
        except SwitchRefused:
            return False
        return self._pending is not None and (self._pending.layout, self._pending.at) == (target, at)

    def _place_in_training(self) -> str:
        """Key of a wish: the same on all members that ask at the same place, another one at any other place."""
        now = (self.era, int(self.engine.micro_steps))
        self._asked = (now, self._asked[1] + 1 if self._asked[0] == now else 1)
        return f"{now[0]}/{now[1]}/{self._asked[1]}"

    def dry_run(self, layout: Layout | None, changes: dict[str, int]) -> SwitchEstimate:
        """See `DynatrainEngine.plan`."""
        engine = self.engine
        try:
            target = self._checked(layout, changes)
            members = self._slots(target)
            feasible.check_memory(self.control.member, self.needs(target, members), engine.candidates.nodes)
        except SwitchRefused as refusal:
            wanted = layout if layout is not None else engine.layout
            return SwitchEstimate(wanted, refusal=refusal.reason, way_out=refusal.way_out)
        budget = engine.settings.memory_budget_bytes
        cost = estimate(plan_switch(engine.vps, target, members), budget, self._bytes_per_second)
        figures = (cost.bytes_sent, cost.highest_peak_bytes, cost.seconds, self._bytes_per_second)
        return SwitchEstimate(target, members, *figures)

    def _wish(self, layout: Layout | None, at: int | None, changes: dict[str, int]) -> tuple[Wish, Proposal]:
        """This member's record, with its refusal if it has one, and the proposal that follows from it."""
        engine, refusal = self.engine, None
        try:
            target = self._checked(layout, changes)
            if self._pending is not None and not self._pending.done:
                raise SwitchRefused(f"a switch to {self._pending.layout} is pending", "wait until it is done")
            if self._preparation is not None:
                raise SwitchRefused("a change of members is under way", "ask again after it")
            if at is not None and (isinstance(at, bool) or not isinstance(at, int)):
                raise SwitchRefused(f"at={at!r} is not a whole number", "give a number of optimizer steps")
            if at is not None and at < engine.global_steps:
                raise SwitchRefused(f"step {at} has passed: this is step {engine.global_steps}", "give a later step")
            members = self._slots(target)
            feasible.check_memory(self.control.member, self.needs(target, members), engine.candidates.nodes)
        except SwitchRefused as error:
            refusal, members = (error.reason, error.way_out), engine.members
            target = layout if isinstance(layout, Layout) else engine.layout
        wish = Wish(target.to_dict(), at, engine.global_steps, refusal)
        return wish, Proposal(self.attempt + 1, engine.layout, engine.members, target, members, at)

    def register(self, groups: list[Mapping[str, Any]], window_is_open: bool) -> bool:
        """See `DynatrainEngine.register_parameters`."""
        layout = self.engine.layout
        if is_partitioned(layout):
            plain = layout.replace(pipe=1, expert=1, tensor=1, boundaries=None)
            raise SwitchRefused(f"{layout}: registering needs every tensor whole", f"switch to {plain} first")
        place, is_open = self._place_in_training(), self._in_the_way(window_is_open)
        return registration.register(self.engine, place, groups, is_open)

    def register_again(self, records: Sequence[dict[str, Any]]) -> None:
        """On an idle member: what the job has registered."""
        registration.repeat(self.engine, records)

    def save(self, path: str | os.PathLike[str], tag: str | None, window_is_open: bool) -> Path:
        """See `DynatrainEngine.save_universal`."""
        key, is_open = f"save/{self._place_in_training()}", self._in_the_way(window_is_open)
        return self.engine.saver.save(path, tag, key, is_open, None)

    def start_save(self, path: str | os.PathLike[str], tag: str | None, window_is_open: bool) -> PendingSave:
        """See `DynatrainEngine.start_save_universal`."""
        key, is_open = f"save/{self._place_in_training()}", self._in_the_way(window_is_open)
        return self.engine.saver.start(path, tag, key, is_open, None)

    def load(
        self, path: str | os.PathLike[str], tag: str | None, window_is_open: bool, trust_pickle: bool = False
    ) -> Restored:
        """See `DynatrainEngine.load_universal`; it uses a generation up, as a switch does."""
        place, is_open = self._place_in_training(), self._in_the_way(window_is_open)
        self.attempt += 1
        self._loads = self.engine.generation, 1 + (self._loads[1] if self._loads[0] == self.engine.generation else 0)
        found = restore.load(self.engine, path, tag, place, self.attempt, is_open, trust_pickle)
        self._fallback.settle()
        return found

    def reads(self, load_dir: Any, tag: Any, arguments: Sequence[Any], named: Mapping[str, Any], trust: bool) -> bool:
        """See `stock.is_for_us`."""
        key = f"stock/{self._place_in_training()}"
        return stock.is_for_us(self.engine, key, load_dir, tag, arguments, named, trust)

    def _in_the_way(self, window_is_open: bool) -> str:
        """Why what wants the state to itself cannot be now, in words; nothing if it can."""
        if self._pending is not None and not self._pending.done:
            return f"a switch to {self._pending.layout} is pending"
        return "an accumulation window is open" if window_is_open else ""

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def stand_at(self, place: str, window_is_open: bool) -> None:
        """A boundary: take part in a switch that is due. An idle member returns only when it works."""
        self.engine._has_stood = True
        self.control.raise_if_lost()
        self.engine.saver.look()
        self.engine.membership.stand(self.engine, place, window_is_open)
        self.engine.turns.course.note()

    def save_if_due(self) -> None:
        """On a working member, at a boundary: the fallback checkpoint."""
        self._fallback.stand_at()

    def save_now(self) -> None:
        """Before all working members end: a fallback checkpoint, if there is to be any."""
        self._fallback.save_now()

    def save_beside(self, tag: str, key: str, in_background: bool) -> None:
        """This engine's part of a joint fallback checkpoint."""
        self._fallback.save_beside(tag, key, in_background)

    def stop_listening(self) -> None:
        """SIGTERM is the user's own affair again."""
        self._fallback.stop()

    def settle_fallback(self) -> None:
        """The state was put together just now: no fallback checkpoint is due before the next step."""
        self._fallback.settle()

    def is_due(self, ahead: int = 1) -> bool:
        """On a working member: whether it is to take part in a switch now. ahead: see `agreement.meeting_step`."""
        if self._preparation is None:
            return False
        proposal, step = self._preparation.proposal, int(self.engine.global_steps)
        meet = agreement.meeting_step(self._preparation.board, proposal, self.engine.rank, step, ahead)
        return meet is not None and step >= meet

    def meet_idle(self, place: str) -> None:
        """On an idle member: take part in a switch that begins; let go of one that was given up."""
        if self._preparation is None:
            return
        proposal = self._preparation.proposal
        if agreement.wait_for_rank_0(self.control, proposal):
            self.transact(place)
        else:
            self._see_given_up()

    def pass_time(self, seconds: float) -> None:
        """An idle member's turn: the user's `on_idle`, or a short sleep."""
        if self._on_idle is not None:
            self._on_idle(self.engine)
        else:
            time.sleep(seconds)

    def look_for_proposal(self) -> None:
        """On an idle member: make ready for a switch that the working members have agreed on."""
        if self._preparation is not None:
            return
        record = self.control.read(f"proposal/{self.attempt + 1}")
        if record is None:
            return
        registration.catch_up(self.engine)
        proposal = Proposal.from_json(record)
        if self.control.member in proposal.union:
            self.rehearse(proposal.layout, proposal.members.index(self.control.member))
            self.prepare(proposal)
            return
        outcome = self.control.read(f"record/{proposal.generation}")
        if outcome is not None:
            self.attempt = proposal.generation
            if outcome["commit"]:
                self.engine.layout, self.engine.members = proposal.layout, proposal.members
                self.engine.membership.retrain(proposal.members)

    def _see_given_up(self) -> None:
        """Let go of a preparation that was given up before the meeting."""
        if self._preparation is not None:
            record = self.control.read(f"record/{self._preparation.proposal.generation}")
            if record is not None and not record["commit"]:
                self.close()
