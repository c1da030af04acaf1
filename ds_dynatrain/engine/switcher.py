"""Switches of one engine on one member: requested, prepared, carried out at a boundary or given up, and reported.

A working member looks for a due switch at every boundary and takes part in it. An idle member stays at the boundary,
polling the board (the job's key-value store), until it works again or the job has ended. The number of a proposed
switch is used up whether or not the switch succeeds, so that no key on the board is ever used twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.groups.device import HOST, compute_device, is_accelerated
from ds_dynatrain.adapters.groups.worlds import installed, stand_in_world
from ds_dynatrain.adapters.zero.state import Scalars, Untouched, provide
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.engine.changes import Changes
from ds_dynatrain.engine.checkpoints.lean import LeanTransaction
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.telling import event_of, tell, write_to_monitors
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.agreement import SwitchRequest
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.plan import estimate, plan_switch
from ds_dynatrain.report import EventWriter, SwitchEvent, log_gain, log_recompile, logger
from ds_dynatrain.report import Outcome as HowItEnded
from ds_dynatrain.reshard import feasible, regrouping, streams
from ds_dynatrain.reshard.context import Boards
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.pending import PendingSwitch, Steps, SwitchEstimate
from ds_dynatrain.reshard.preparation import Outcome, Preparation, nothing
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.switch import Transaction, connect_ahead
from ds_dynatrain.reshard.targets import Targets
from ds_dynatrain.space import Layout
from ds_dynatrain.support.proved import warning

ASSUMED_BYTES_PER_SECOND = 1e9
"""Link speed that estimates assume before any switch has been measured."""

OnSwitch = Callable[[SwitchEvent], object]


@dataclass(frozen=True)
class Reason:
    """Reason for a switch request.

    cause: the name of the requesting extension; "" if the script makes the request.
    predicted_gain: see `Proposal`.
    without: members that get no rank in the new layout.
    """

    cause: str = ""
    predicted_gain: float | None = None
    without: tuple[int, ...] = ()


SCRIPT = Reason()


class Switcher:
    """Switches of one engine on this member; see the docstring of the module.

    listeners: the user's functions, called after each committed switch.
    note_window: records the point where a global batch begins.
    discard_window: goes back to the point where the global batch began.
    """

    def __init__(
        self,
        engine: EngineCore,
        targets: Targets,
        saver: Saver,
        changes: Changes,
        note_window: Callable[[], None],
        discard_window: Callable[[], None],
    ) -> None:
        self.engine, self._targets = engine, targets
        self._saver, self._changes = saver, changes
        self._note_window, self._discard_window = note_window, discard_window
        self._steps = Steps()
        self._asked: tuple[tuple[str, int], int] = (("", 0), 0)
        self._entered: Transaction | None = None
        """A late switch (its masters and moments move after the pause) that is entered but not complete; else None."""
        self.listeners: list[OnSwitch] = []
        self.bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._answered: PendingSwitch | None = None
        self._first_step_is_due = False
        self._has_warned = self._has_told_of_batch = False

    # ---- asking --------------------------------------------------------------------------------------------------

    def ask(
        self,
        layout: Layout | None,
        at: int | None,
        changes: Mapping[str, Any],
        late: bool | None = None,
        reason: Reason = SCRIPT,
    ) -> PendingSwitch:
        """Request a switch; see `DynatrainEngine.switch`. The script's request replaces an extension's pending one."""
        late = self.engine.settings.late if late is None else bool(late)
        if self.engine.idle:
            raise SwitchRefused(
                "engine.switch: this member is idle and holds no shard",
                "call it on the working members, where engine.idle is false",
            )
        if self.engine.pending is not None and self._is_pending(layout, at, changes, late):
            return self.engine.pending
        pending, preparation = self.engine.pending, self.engine.preparation
        gives_way = pending is not None and bool(pending.cause) and not reason.cause
        PROCESS.membership.reopen(self.engine)
        request, proposal = self._request(layout, at, changes, late, reason, gives_way)
        try:
            agreed = agreement.agree(
                self.engine.control, self.place_in_training(), request, self.engine.members, proposal
            )
        except (td.DistError, WorldChanged) as error:
            raise SwitchRefused(
                f"the job's key-value store does not answer: {error}", "training goes on; ask again later"
            ) from error
        if gives_way and preparation is not None:  # all working members do this; idle ones read it on the board
            first = "the script asks for another switch, which goes first"
            if self.engine.rank == 0:
                preparation.board.decide(preparation.proposal.record_key, {"commit": False, "reason": first})
            self.give_up(first)
        self.prepare(agreed)
        self.engine.pending = PendingSwitch(agreed.layout, agreed.generation, agreed.at, late=late, cause=agreed.cause)
        return self.engine.pending

    def _is_pending(self, layout: Layout | None, at: int | None, changes: Mapping[str, Any], late: bool) -> bool:
        """Return whether this switch is already pending, for example because a loop requests it again within one
        optimizer step."""
        try:
            target = feasible.target_layout(self.engine.layout, layout, changes)
        except SwitchRefused:
            return False
        pending, wanted = self.engine.pending, (target.replace(order=None), at, late)
        return pending is not None and (pending.layout.replace(order=None), pending.at, pending.late) == wanted

    def place_in_training(self) -> str:
        """Return a key for a request: unique to this point in training, and the same on all members that make this
        request."""
        now = (self.engine.segment, self.engine.micro_steps)
        self._asked = (now, self._asked[1] + 1 if self._asked[0] == now else 1)
        return f"{now[0]}/{now[1]}/{self._asked[1]}"

    def dry_run(
        self, layout: Layout | None, changes: Mapping[str, Any], without: tuple[int, ...] = ()
    ) -> SwitchEstimate:
        """Estimate a switch; see `DynatrainEngine.plan`.

        without: members that get no rank in the new layout.
        """
        engine = self.engine
        try:
            target = self._targets.checked(layout, changes)
            target, found = self._targets.placed(target, without)
        except SwitchRefused as refusal:
            wanted = layout if layout is not None else engine.layout
            return SwitchEstimate(wanted, refusal=refusal.reason, way_out=refusal.way_out)
        members, budget = found.members, engine.settings.memory_budget_bytes
        plan = plan_switch(engine.vps, target, members, nodes=engine.candidates.nodes)
        cost = estimate(plan, budget, self.bytes_per_second)
        return SwitchEstimate(
            target,
            members,
            bytes_sent=cost.bytes_sent,
            bytes_bound=found.bytes_bound,
            rank_zero_bytes=found.rank_zero_bytes,
            peak_memory_bytes=cost.highest_peak_bytes,
            seconds=cost.seconds,
            bytes_per_second=self.bytes_per_second,
            copies_memory_bytes=sum(extension.memory_in(target, members) for extension in engine.job.extensions),
            step_ms=self._targets.step_ms(target, members),
        )

    def _request(
        self,
        layout: Layout | None,
        at: int | None,
        changes: Mapping[str, Any],
        late: bool,
        reason: Reason,
        gives_way: bool,
    ) -> tuple[SwitchRequest, Proposal]:
        """Return this member's request, including its refusal if there is one, and the resulting proposal.

        gives_way: whether the pending switch is given up in favour of this one.
        """
        engine, refusal = self.engine, None
        try:
            if engine.awaits_late:
                raise SwitchRefused(self.in_the_way(), "ask again after the next engine.step()")
            target = self._targets.checked(layout, changes)
            if late:
                self._targets.check_late(target)
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
            target, found = self._targets.placed(target, reason.without, late)
            members = found.members
        except SwitchRefused as error:
            refusal, members = (error.reason, error.way_out), engine.members
            target = layout if isinstance(layout, Layout) else engine.layout
        request = SwitchRequest(target.to_dict(), at, engine.global_steps, refusal, late)
        places = engine.layout, engine.members, target, members, at
        why = reason.cause, reason.predicted_gain
        return request, Proposal(self.engine.attempt + 1, *places, False, late, *why)

    def register(self, groups: list[Mapping[str, Any]]) -> bool:
        """Register parameter groups; see `DynatrainEngine.update_param_groups`."""
        return regrouping.register(self.engine, self.place_in_training(), groups, self.in_the_way())

    def in_the_way(self, of_reading: bool = False) -> str:
        """Return a description of why an operation that needs exclusive use of the state cannot run now; "" if it can.

        of_reading: whether the operation only reads the state, so that a pending switch does not prevent it.
        """
        pending = self.engine.pending
        if self.engine.awaits_late:
            return f"masters and moments of the switch to {self.engine.layout} are on their way until engine.step()"
        if pending is not None and not of_reading:
            return f"a switch to {pending.layout} is pending"
        return "an accumulation window is open" if self.engine.has_open_window else ""

    # ---- made ready -----------------------------------------------------------------------------------------------

    def rehearse(self, layout: Layout, rank: int) -> SwitchRefused | None:
        """Build a layout's optimizer once, without communication and over memory that is never touched, and drop it.

        This completes all imports and compilations that a first build needs. Called on idle members, whose random
        streams stay unchanged. Returns None if the layout can be built; otherwise the refusal with which this member
        votes on the switch.
        """
        engine, before = self.engine, streams.capture()
        try:
            local = engine.vps.local(layout, rank)
            empty = provide(local, engine.memory_in(layout), set(), {}, Untouched())
            world = stand_in_world(rank, layout, engine.vps.ties(layout))
            with installed(world, engine.launch):
                engine.host.reshape(layout, rank, local.tensors)
                try:
                    engine.host.attach(layout, world, engine.config_for(layout), empty, Scalars())
                finally:
                    engine.host.detach()
        except Exception as error:
            logger.exception("member %d cannot build its part of %s", engine.control.member, layout)
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
            return SwitchRefused(f"member {engine.control.member} cannot build {layout}: {said}")
        finally:
            engine.host.leave_world()
            streams.restore(before)
        return None

    def prepare(
        self,
        proposal: Proposal,
        boards: Boards | None = None,
        check: Callable[[], None] = nothing,
        nodes: Mapping[int, str] | None = None,
        refusal: SwitchRefused | None = None,
    ) -> None:
        """Prepare a proposed switch in the background.

        boards: the boards on which the switch is negotiated; by default those of the current generation.
        check: raises SwitchRefused if this member cannot take part; called in the background.
        nodes: the node of each member; needed if some members are not in the current generation.
        refusal: the reason why this member cannot take part, if it is already known.
        """
        self._warn_of_hardware(proposal)
        engine, around, groups = self.engine, self.engine.context, self.engine.own_groups
        engine.vps.mesh(proposal.source_layout), engine.vps.mesh(proposal.layout)  # asks DeepSpeed: in the main thread
        front, back = (around.control, around.background) if boards is None else boards
        present, known = engine.memory_in(proposal.source_layout), engine.candidates.nodes if nodes is None else nodes
        preparation = Preparation(
            proposal,
            front,
            back,
            engine.vps,
            live={} if engine.idle else engine.host.state_buffers()[0],
            memory=engine.memory_in(proposal.layout),
            make=engine.host.make_children,
            budget_bytes=engine.settings.memory_budget_bytes,
            way=engine.settings.transport,
            on_device=frozenset(kind for kind, held in present.items() if held.place.device != HOST),
            is_lean=engine.is_lean,
            check=check if refusal is None else partial(_raise, refusal),
            present=engine.world,
            own=partial(groups.kinds, proposal.layout, proposal.members, known, front.member),
            own_count=len(groups.rules),
            number=engine.job.number,
            has_sequence=engine.job.has_sequence,
            nodes=known,
        )
        PROCESS.membership.guard(preparation)
        engine.preparation, engine.attempt = preparation, proposal.generation
        preparation.start()

    def _warn_of_hardware(self, proposal: Proposal) -> None:
        """Warn once, on rank 0, if a switch uses parts that have not been tested on this kind of accelerator."""
        engine, source, target = self.engine, proposal.source_layout, proposal.layout
        if self._has_warned or engine.rank != 0 or not is_accelerated():
            return
        self._has_warned = True
        transport, nodes = engine.settings.transport, engine.candidates.nodes
        used = {
            "groups": True,
            "stages": True,
            "batches": transport == "nccl" or (transport == "auto" and len({*nodes.values()}) > 1),
            "late": proposal.late,
            "members": len(nodes) > min(source.world_size, target.world_size),
            "offload": engine.deepspeed.zero_use_cpu_optimizer(),
            "compile": bool(engine.host.compiled_modules),
            "fused": any(group.get("fused") for group in engine.host.basic_optimizer.param_groups),
            "engines": PROCESS.is_shared,
            "pipe": max(source.pipe, target.pipe) > 1,
            "tensor": max(source.tensor, target.tensor) > 1,
            "expert": max(source.expert, target.expert) > 1,
            "sequence": max(source.sequence, target.sequence) > 1,
        }
        said = warning(compute_device().type, [part for part, is_used in used.items() if is_used])
        if said:
            logger.warning(said)

    def tell_of_batch(self) -> None:
        """Warn once, on rank 0, if the current layout cuts a global batch into micro-batches of one sample."""
        engine = self.engine
        if self._has_told_of_batch or engine.idle or engine.rank != 0:
            return
        notice = engine.batch_for(engine.layout).notice
        if notice:
            self._has_told_of_batch = True
            logger.warning("%s", notice)

    def connect_ahead(self) -> None:
        """Connect the members of the next world at a boundary before the switch. If this fails, give the switch up."""
        preparation = self.engine.preparation
        if preparation is None:
            return
        decision = connect_ahead(preparation, self.engine.world)
        if not decision.commit:
            self.give_up(decision.reason)
        decision.raise_interrupt()

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def at_boundary(self, place: str) -> None:
        """Take part in any switch that is due at this boundary. An idle member returns only once it works again."""
        self.engine.has_stood = True
        self.engine.release_old_state(unless_needed=True)
        self.engine.control.raise_if_lost()
        self._saver.look()
        self._steps.at_boundary(PROCESS.membership.at_boundary(self.engine, place))
        PROCESS.sync_points.note()
        self._changes.look()

    def note_step(self) -> None:
        """Warn if something waits for a boundary and the training loop reaches none. Called after an optimizer step."""
        for waiting in self._steps.past_boundary(self._waiting()):
            logger.warning(
                "%s, and there was no boundary in %d optimizer steps: %s",
                *(waiting, self._steps.count, self._steps.reason),
            )

    def _waiting(self) -> Iterator[str]:
        """Yield a description of each thing that waits for a boundary. Things that wait on all members are reported by
        rank 0 only."""
        pending = self.engine.pending
        for extension in self.engine.job.extensions:
            yield from extension.waiting(self._steps.count)
        if self.engine.rank == 0 and pending is not None:
            yield f"a switch to {pending.layout} is pending"
        if self.engine.rank == 0 and (change := PROCESS.membership.waiting_change(self.engine)):
            yield f"a change of members waits ({change})"

    def pass_time(self, seconds: float) -> None:
        """While this member waits for work, call the user's `on_idle`, or sleep for `seconds` if there is none."""
        on_idle = self.engine.job.on_idle
        if on_idle is not None:
            on_idle(self.engine.deepspeed)
        else:
            time.sleep(seconds)

    # ---- carried out: a late switch, in two votes -----------------------------------------------------------------

    def enter(self, preparation: Preparation, place: str) -> None:
        """Carry out the pause of a late switch. Masters and moments follow after the pause.

        A member that does not train in the new world completes the whole switch in this call.
        """
        engine = self.engine
        transaction = self._entered = Transaction(engine, preparation, place)
        engine.late_worlds = transaction.worlds
        with without_collection():
            goes_on = transaction.enter(self._discard_window)
        engine.late_worlds = transaction.worlds
        if transaction.has_entered:
            PROCESS.membership.entered(engine)
        if not goes_on:
            self.settle()
            return
        engine.awaits_late = True
        self._note_window()
        engine.host.compilations.begin(is_anew=True)
        transaction.outcome.pause_ms = 1e3 * (time.perf_counter() - transaction.begin)

    def settle(self) -> bool:
        """Complete a late switch before an optimizer step, and return whether the step may be taken.

        The step may not be taken if masters or moments did not arrive. In this case the global batch is discarded.
        """
        transaction, self._entered = self._entered, None
        if transaction is None:
            return True
        begin, outcome = time.perf_counter(), transaction.outcome
        try:
            transaction.settle()
        finally:
            self.engine.awaits_late, self.engine.late_worlds = False, ()
        outcome.late_wait_ms = 1e3 * (time.perf_counter() - begin)
        self.note(transaction)
        PROCESS.membership.ended(self.engine, transaction.proposal, outcome)
        if transaction.interrupt is not None:
            raise transaction.interrupt
        return outcome.committed

    @property
    def entered_at(self) -> str:
        """Name of the boundary at which the incomplete late switch was entered; "" if there is none."""
        return "" if self._entered is None else self._entered.place

    def give_up_late(self, reason: str) -> None:
        """Undo a late switch whose outcome is not recorded yet, and go back to the previous world."""
        if self._entered is not None:
            self._entered.give_up(reason)
            self.settle()

    def note(self, transaction: Transaction | LeanTransaction) -> None:
        """Report the outcome of a switch to the log, the `PendingSwitch` and the listeners."""
        preparation, outcome = transaction.preparation, transaction.outcome
        engine, self.engine.preparation = self.engine, None
        if not engine.idle:
            (engine.settle_state if outcome.committed else engine.note_safe)()
        pause_ms = 1e3 * (time.perf_counter() - transaction.begin) if outcome.pause_ms is None else outcome.pause_ms
        event = event_of(engine, preparation, outcome, transaction.was, pause_ms, self.bytes_per_second)
        engine.last_switch, self._first_step_is_due = event, True
        if not (outcome.is_rebuilt and outcome.committed and outcome.pause_ms is not None):  # else done in the pause
            engine.host.compilations.begin(is_anew=outcome.is_rebuilt)
        self.tell_of_batch()
        self._answer(event)
        tell(engine, event)
        if engine.rank == 0:
            if engine.settings.report.monitor:
                write_to_monitors(engine.deepspeed, event)
            PROCESS.membership.tell(engine, event)
        if event.outcome == "committed":
            if event.bytes_busiest and not preparation.proposal.late:  # late moves share the links with training
                self.bytes_per_second = event.bytes_busiest / (1e-3 * event.move_ms)
            for listener in self.listeners:
                listener(event)

    def _answer(self, event: SwitchEvent) -> None:
        """Record the event in the pending switch that the user holds."""
        pending = self.engine.pending
        if pending is not None:
            pending.event = event
            self._answered, self.engine.pending = pending, None

    def give_up(self, reason: str) -> None:
        """Give up the switch that is being prepared, because no member can carry it out any longer."""
        if self.engine.preparation is not None:
            tell(self.engine, self._drop(self.engine.preparation, reason, "rolled_back"), write=None)

    def cancel(self) -> None:
        """Report a switch as cancelled if it could not begin at any boundary. Called when the job ends."""
        preparation = self.engine.preparation
        if preparation is None:
            return
        if self.engine.pending is None and preparation.board is not self.engine.control:
            self.engine.close_preparation()  # a change of members, which this script did not request
            return
        tell(self.engine, self._drop(preparation, "the job ended before a boundary came for it", "cancelled"))

    def _drop(self, preparation: Preparation, reason: str, how: HowItEnded) -> SwitchEvent:
        """Give up a preparation, and return the event that reports this, with a pause of 0."""
        self.engine.close_preparation()
        was = self.engine.layout, self.engine.members
        outcome = Outcome(reason=reason)
        event = event_of(self.engine, preparation, outcome, was, 0.0, self.bytes_per_second)
        event = replace(event, outcome=how)
        self.engine.last_switch = event
        self._answer(event)
        return event

    def note_first_step(self) -> None:
        """Add the recompilation time to the last switch's event. Called after the first optimizer step since the
        switch.

        The new event replaces `last_switch` and the event of the pending switch; the report file gets a further line.
        """
        engine = self.engine
        if not self._first_step_is_due:
            return
        self._first_step_is_due = False
        event = engine.last_switch
        if event is None or not engine.host.compilations.seconds:
            return
        engine.last_switch = replace(event, recompile_ms=1e3 * engine.host.compilations.seconds)
        if self._answered is not None and self._answered.event is event:
            self._answered.event = engine.last_switch
        tell(engine, engine.last_switch, log_recompile, EventWriter.write_recompile)

    def note_gain(self, event: SwitchEvent, gain: float, slowdown_removed: float | None) -> None:
        """Report the gain of a switch, as a fraction of a step's time, once a later window has measured it.

        slowdown_removed: see `SwitchEvent`.

        If `last_switch` is that switch, it gets the new event; the report file gets a further line.
        """
        engine, last = self.engine, self.engine.last_switch
        if last is not None and last.generation == event.generation:
            engine.last_switch = replace(last, measured_gain=gain, slowdown_removed=slowdown_removed)
        event = replace(event, measured_gain=gain, slowdown_removed=slowdown_removed)
        tell(engine, event, log_gain, EventWriter.write_gain)


def _raise(refusal: SwitchRefused) -> None:
    raise refusal
