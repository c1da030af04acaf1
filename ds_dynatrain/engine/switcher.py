"""Switches of one engine on one member: requesting, preparing, carrying out, giving up and reporting them.

A working member checks at every boundary (the point between two optimizer steps) whether a switch is due, and takes
part in it. An idle member stays at the boundary, polling the board (the job's key-value store), until it works again or
the job has ended. The number of a proposed switch counts as used whether or not the switch succeeds, so that no key on
the board is ever used twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.groups.device import HOST, compute_device, is_accelerated
from ds_dynatrain.adapters.groups.worlds import installed, stand_in_world
from ds_dynatrain.adapters.zero.state import Scalars, Untouched, provide
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.engine.changes import Change, OnChange, Place
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.discarded import DiscardableEngine
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.plan import estimate, plan_switch
from ds_dynatrain.report import (
    CertificateSummary,
    EventWriter,
    Side,
    SwitchEvent,
    log_event,
    log_gain,
    log_recompile,
    logger,
)
from ds_dynatrain.report import Outcome as HowItEnded
from ds_dynatrain.report.monitors import rows
from ds_dynatrain.reshard import feasible, streams
from ds_dynatrain.reshard.context import Boards
from ds_dynatrain.reshard.pending import PendingSwitch, Steps, SwitchEstimate
from ds_dynatrain.reshard.preparation import SUMS, UNKNOWN, Outcome, Preparation, nothing
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.switch import Transaction, connect_ahead
from ds_dynatrain.reshard.targets import Targets
from ds_dynatrain.space import Layout
from ds_dynatrain.support.proved import warning

ASSUMED_BYTES_PER_SECOND = 1e9
"""Link speed that estimates assume before any switch has been measured."""

OnSwitch = Callable[[SwitchEvent], object]
Write = Callable[[EventWriter, SwitchEvent], None]
"""Function that writes an event's line into the report file."""


@dataclass(frozen=True)
class Reason:
    """Reason for a request to switch.

    cause: the name of the extension that makes the request; "" if the script makes it.
    predicted_gain: the fraction by which the step time is expected to fall, if this is the reason for the switch.
    without: members that must get no rank in the new layout.
    """

    cause: str = ""
    predicted_gain: float | None = None
    without: tuple[int, ...] = ()


SCRIPT = Reason()


@dataclass(eq=False)
class SwitchingEngine(DiscardableEngine):
    """An engine that can switch to another layout; see the docstring of the module.

    switch_listeners: the user's functions, called after each committed switch.
    change_listeners: the user's functions, called whenever this member's rank, the members or the layout have changed.
    """

    switch_listeners: list[OnSwitch] = field(default_factory=list)
    change_listeners: list[OnChange] = field(default_factory=list)
    _told: Place | None = None
    """Layout, members and rank that were last reported to the script. They are compared with the current ones after
    every boundary, and while this member waits for work, so no other code has to report a change."""
    _formed: int = 0
    bytes_per_second: float = ASSUMED_BYTES_PER_SECOND
    _asked: tuple[tuple[str, int], int] = (("", 0), 0)
    _entered: Transaction | None = None
    """A late switch whose optimizer state is still in transit; None if there is none."""
    _answered: PendingSwitch | None = None
    _first_step_is_due: bool = False
    _has_warned: bool = False
    _has_told_of_batch: bool = False

    def __post_init__(self) -> None:
        self.saver, self.targets = Saver(self), Targets(self)
        self._steps = Steps()

    # ---- requests ------------------------------------------------------------------------------------------------

    def ask_for_switch(
        self,
        layout: Layout | None,
        at: int | None,
        changes: Mapping[str, Any],
        late: bool | None = None,
        reason: Reason = SCRIPT,
    ) -> PendingSwitch:
        """Request a switch; see `DynatrainEngine.switch`. If an extension's switch is pending, a request of the script
        replaces it."""
        late = self.settings.late if late is None else bool(late)
        if self.idle:
            raise SwitchRefused(
                "engine.switch: this member is idle and holds no shard",
                "call it on the working members, where engine.idle is false",
            )
        if self.pending is not None and self._is_pending(layout, at, changes, late):
            return self.pending
        pending, preparation = self.pending, self.preparation
        gives_way = pending is not None and bool(pending.cause) and not reason.cause
        PROCESS.membership.reopen(self)
        proposal, refusal = self._proposed(layout, at, changes, late, reason, gives_way)
        here = self.control, self.place_in_training(), self.members
        try:
            agreed = agreement.agree(*here, proposal, self.global_steps, refusal)
        except (td.DistError, WorldChanged) as error:
            raise SwitchRefused(
                f"the job's key-value store does not answer: {error}", "training goes on; ask again later"
            ) from error
        if gives_way and preparation is not None:  # on all working members; idle ones read the record
            first = "the script asks for another switch, which goes first"
            if self.rank == 0:
                preparation.board.decide(preparation.proposal.record_key, {"commit": False, "reason": first})
            self.give_up(first)
        self.prepare(agreed)
        self.pending = PendingSwitch(agreed.layout, agreed.generation, agreed.at, late=late, cause=agreed.cause)
        return self.pending

    def _is_pending(self, layout: Layout | None, at: int | None, changes: Mapping[str, Any], late: bool) -> bool:
        """Return whether the same switch is already pending, for example because a script requests it again within one
        optimizer step."""
        try:
            target = feasible.target_layout(self.layout, layout, changes)
        except SwitchRefused:
            return False
        pending, wanted = self.pending, (target.replace(order=None), at, late)
        return pending is not None and (pending.layout.replace(order=None), pending.at, pending.late) == wanted

    def place_in_training(self) -> str:
        """Return a key for a request of the script. It is unique to this point in training, and the same on all members
        that make the request."""
        now = (self.segment, self.micro_steps)
        self._asked = (now, self._asked[1] + 1 if self._asked[0] == now else 1)
        return f"{now[0]}/{now[1]}/{self._asked[1]}"

    def estimate(
        self, layout: Layout | None, changes: Mapping[str, Any], without: tuple[int, ...] = ()
    ) -> SwitchEstimate:
        """Estimate what a switch would cost; see `DynatrainEngine.plan`.

        without: members that must get no rank in the new layout.
        """
        try:
            target = self.targets.checked(layout, changes)
            target, found = self.targets.placed(target, without)
        except SwitchRefused as refusal:
            wanted = layout if layout is not None else self.layout
            return SwitchEstimate(wanted, refusal=refusal.reason, way_out=refusal.way_out)
        members, budget = found.members, self.settings.memory_budget_bytes
        plan = plan_switch(self.vps, target, members, nodes=self.candidates.nodes)
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
            copies_memory_bytes=sum(extension.memory_in(target, members) for extension in self.job.extensions),
            step_ms=self.targets.step_ms(target, members),
        )

    def _proposed(
        self,
        layout: Layout | None,
        at: int | None,
        changes: Mapping[str, Any],
        late: bool,
        reason: Reason,
        gives_way: bool,
    ) -> tuple[Proposal, tuple[str, str] | None]:
        """Return the switch that this member proposes, and its refusal (the reason and advice); None instead of a
        refusal if the switch is possible.

        gives_way: whether the pending switch is given up in favor of this one.
        """
        refusal = None
        try:
            if self.awaits_late:
                raise SwitchRefused(self.in_the_way(), "ask again after the next engine.step()")
            target = self.targets.checked(layout, changes)
            if late:
                self.targets.check_late(target)
            if self.pending is not None and not gives_way:
                raise SwitchRefused(
                    f"a switch to {self.pending.layout} is pending",
                    "ask again once engine.is_switching is false",
                )
            if self.preparation is not None and not gives_way:
                raise SwitchRefused("a change of members is under way", "ask again after the next step")
            if at is not None and (isinstance(at, bool) or not isinstance(at, int)):
                raise SwitchRefused(
                    f"at={at!r} is not a whole number",
                    f"give a number of optimizer steps, from {self.global_steps}",
                )
            if at is not None and at < self.global_steps:
                raise SwitchRefused(f"step {at} has passed: this is step {self.global_steps}", "give a later at=")
            target, found = self.targets.placed(target, reason.without, late)
            members = found.members
        except SwitchRefused as error:
            refusal, members = (error.reason, error.way_out), self.members
            target = layout if isinstance(layout, Layout) else self.layout
        places, why = (self.layout, self.members, target, members, at), (reason.cause, reason.predicted_gain)
        return Proposal(self.attempt + 1, *places, False, late, *why), refusal

    def in_the_way(self, of_reading: bool = False) -> str:
        """Return a description of why an operation that needs exclusive use of the state cannot run now; "" if it can.

        of_reading: whether the operation only reads the state, so that a pending switch does not prevent it.
        """
        pending = self.pending
        if self.awaits_late:
            return f"masters and moments of the switch to {self.layout} are on their way until engine.step()"
        if pending is not None and not of_reading:
            return f"a switch to {pending.layout} is pending"
        return "an accumulation window is open" if self.has_open_window else ""

    # ---- preparation ----------------------------------------------------------------------------------------------

    def rehearse(self, layout: Layout, rank: int, check: Callable[[], None] = nothing) -> Callable[[], None]:
        """Build the optimizer for a rank of a layout once, over memory that is never touched and without communication,
        and discard it.

        This does all imports and compilations that the first build needs. Called on idle members; their random streams
        stay unchanged. Returns a function that checks, at the vote on the switch, whether this member can take part:
        `check` if the optimizer could be built, otherwise a function that raises the refusal.
        """
        before = streams.capture()
        try:
            local = self.vps.local(layout, rank)
            empty = provide(local, self.memory_in(layout), set(), {}, Untouched())
            world = stand_in_world(rank, layout, self.vps.ties(layout))
            with installed(world, self.launch):
                self.host.reshape(layout, rank, local.tensors)
                try:
                    self.host.attach(layout, world, self.config_for(layout), empty, Scalars())
                finally:
                    self.host.detach()
        except Exception as error:
            logger.exception("member %d cannot build its part of %s", self.control.member, layout)
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
            return partial(_raise, SwitchRefused(f"member {self.control.member} cannot build {layout}: {said}"))
        finally:
            self.host.leave_world()
            streams.restore(before)
        return check

    def prepare(
        self,
        proposal: Proposal,
        boards: Boards | None = None,
        check: Callable[[], None] = nothing,
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        """Start to prepare a proposed switch in the background.

        boards: the key-value stores in which the switch is negotiated; by default those of the current generation.
        check: raises SwitchRefused if this member cannot take part; called in the background.
        nodes: the node of each member; needed if some members are not in the current generation.
        """
        self._warn_of_hardware(proposal)
        around, groups = self.context, self.own_groups
        self.vps.mesh(proposal.source_layout), self.vps.mesh(proposal.layout)  # asks DeepSpeed, so on the main thread
        front, back = boards or (around.control, around.background)
        present, known = self.memory_in(proposal.source_layout), nodes or self.candidates.nodes
        preparation = Preparation(
            proposal,
            front,
            back,
            self.vps,
            live={} if self.idle else self.host.state_buffers()[0],
            memory=self.memory_in(proposal.layout),
            make=self.host.make_children,
            budget_bytes=self.settings.memory_budget_bytes,
            way=self.settings.transport,
            on_device=frozenset(kind for kind, held in present.items() if held.place.device != HOST),
            is_lean=self.is_lean,
            check=check,
            present=self.world,
            own=partial(groups.kinds, proposal.layout, proposal.members, known, front.member),
            own_count=len(groups.rules),
            number=self.job.number,
            has_sequence=self.job.has_sequence,
            nodes=known,
        )
        PROCESS.membership.guard(preparation)
        self.preparation, self.attempt = preparation, proposal.generation
        preparation.start()

    def _warn_of_hardware(self, proposal: Proposal) -> None:
        """Warn once, on rank 0, if a switch uses features that have not been tested on this kind of accelerator."""
        source, target = proposal.source_layout, proposal.layout
        if self._has_warned or self.rank != 0 or not is_accelerated():
            return
        self._has_warned = True
        transport, nodes = self.settings.transport, self.candidates.nodes
        used = {
            "groups": True,
            "stages": True,
            "batches": transport == "nccl" or (transport == "auto" and len({*nodes.values()}) > 1),
            "late": proposal.late,
            "members": len(nodes) > min(source.world_size, target.world_size),
            "offload": self.deepspeed.zero_use_cpu_optimizer(),
            "compile": bool(self.host.compiled_modules),
            "fused": any(group.get("fused") for group in self.host.basic_optimizer.param_groups),
            "engines": PROCESS.is_shared,
        }
        for axis in ("pipe", "tensor", "expert", "sequence"):
            used[axis] = max(getattr(source, axis), getattr(target, axis)) > 1
        said = warning(compute_device().type, [part for part, is_used in used.items() if is_used])
        if said:
            logger.warning(said)

    def tell_of_batch(self) -> None:
        """Warn once, on rank 0, if the current layout divides a global batch into micro-batches of one sample."""
        if not self._has_told_of_batch and self.rank == 0 and (notice := self.batch_for(self.layout).notice):
            self._has_told_of_batch = True
            logger.warning("%s", notice)

    def connect_ahead(self) -> None:
        """Connect the members of the next world some steps before the switch. If this fails, give the switch up."""
        preparation = self.preparation
        if preparation is None:
            return
        decision = connect_ahead(preparation, self.world)
        if not decision.commit:
            self.give_up(decision.reason)
        decision.raise_interrupt()

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def at_boundary(self, place: str) -> None:
        """Take part in any switch that is due now, between two steps. An idle member returns only once it works again.

        place: the loader or call at which the script has arrived.
        """
        self.has_stood = True
        self.release_old_state(unless_needed=True)
        self.control.raise_if_lost()
        self.saver.settle(0)
        self._steps.at_boundary(PROCESS.membership.at_boundary(self, place))
        PROCESS.sync_points.note()
        self.tell_of_change()

    def begin_places(self) -> None:
        """Record this member's first layout and rank as already reported. Called once the engine is made, when the
        script can read them itself."""
        self._told, self._formed = self._present(), PROCESS.membership.formed[0]

    def tell_of_change(self) -> None:
        """Call the user's listeners if this member's rank, the members or the layout have changed.

        Does nothing while a new world is being formed, because these values are not final yet.
        """
        if self._told is None or PROCESS.membership.is_aborted:
            return
        before, self._told = self._told, self._present()
        formed, (self._formed, words) = self._formed, PROCESS.membership.formed
        if before == self._told:
            return
        event, reason = self.last_switch, words
        if self._formed == formed:  # no members have come or gone since the last place
            reason = (event.cause if event is not None else "") or "switch"
        if event is not None and (event.outcome, event.generation) == ("rolled_back", before.generation):
            reason = f"rolled back: {event.reason}" if self._formed <= formed else reason
        change = Change(before, self._told, self.global_steps, reason)
        for listener in self.change_listeners:
            listener(change)

    def _present(self) -> Place:
        return Place(self.layout, self.members, self.rank, 0 if self.idle else self.generation)

    def note_step(self) -> None:
        """Warn if a change waits for a boundary (a call at which it could take effect) and the script does not reach
        one. Called after an optimizer step."""
        for waiting in self._steps.past_boundary(self._waiting()):
            logger.warning(
                "%s, and there was no boundary in %d optimizer steps: %s",
                *(waiting, self._steps.count, self._steps.reason),
            )

    def _waiting(self) -> Iterator[str]:
        """Yield a description of each change that waits for a boundary. Changes that concern all members are reported
        by rank 0 only."""
        pending = self.pending
        for extension in self.job.extensions:
            yield from extension.waiting(self._steps.count)
        if self.rank == 0 and pending is not None:
            yield f"a switch to {pending.layout} is pending"
        if self.rank == 0 and (change := PROCESS.membership.waiting_change(self)):
            yield f"a change of members waits ({change})"

    def pass_time(self, seconds: float) -> None:
        """Call the user's `on_idle`, or sleep for `seconds` if there is none. Called repeatedly while this member waits
        for work."""
        if self.job.on_idle is None:
            time.sleep(seconds)
        else:
            self.job.on_idle(self.deepspeed)

    # ---- a late switch, in two votes ------------------------------------------------------------------------------

    def enter_late(self, preparation: Preparation, place: str) -> None:
        """Carry out the pause of a late switch. Optimizer state moves after the pause, while training continues.

        A member that does not train in the new world completes the whole switch in this call.

        place: the loader or call at which the script has arrived.
        """
        transaction = self._entered = Transaction(self, preparation, place)
        self.late_worlds = transaction.worlds
        with without_collection():
            goes_on = transaction.enter(self.discard_window)
        self.late_worlds = transaction.worlds
        if transaction.has_entered:
            PROCESS.membership.entered(self)
        if not goes_on:
            self.settle_late()
            return
        self.awaits_late = True
        self.note_window()
        self.host.compilations.begin(is_anew=True)
        transaction.outcome.pause_ms = 1e3 * (time.perf_counter() - transaction.begin)

    def settle_late(self) -> bool:
        """Complete a late switch (optimizer state may still be in transit) before an optimizer step; return whether the
        step may be taken.

        If some optimizer state has not arrived, the switch is rolled back, the step must not be taken, and the global
        batch is discarded.
        """
        transaction, self._entered = self._entered, None
        if transaction is None:
            return True
        begin, outcome = time.perf_counter(), transaction.outcome
        try:
            transaction.settle()
        finally:
            self.awaits_late, self.late_worlds = False, ()
        outcome.late_wait_ms = 1e3 * (time.perf_counter() - begin)
        self.report(transaction)
        PROCESS.membership.ended(self, transaction.proposal, outcome)
        if transaction.interrupt is not None:
            raise transaction.interrupt
        return outcome.committed

    @property
    def entered_at(self) -> str:
        """Name of the loader or call at which the current late switch began; "" if no late switch is in progress."""
        return "" if self._entered is None else self._entered.place

    def give_up_late(self, reason: str) -> None:
        """Undo a late switch whose outcome is not decided yet, and return to the previous world."""
        if self._entered is not None:
            self._entered.give_up(reason)
            self.settle_late()

    def report(self, transaction: Transaction) -> None:
        """Report the outcome of a switch to the log, the `PendingSwitch` and the listeners."""
        preparation, outcome = transaction.preparation, transaction.outcome
        self.preparation = None
        if not self.idle:
            (self.settle_state if outcome.committed else self.note_safe)()
        pause_ms = 1e3 * (time.perf_counter() - transaction.begin) if outcome.pause_ms is None else outcome.pause_ms
        event = self._event(preparation, outcome, transaction.was, pause_ms)
        self._first_step_is_due = True
        if not (outcome.is_rebuilt and outcome.committed and outcome.pause_ms is not None):  # else begun in the pause
            self.host.compilations.begin(is_anew=outcome.is_rebuilt)
        self.tell_of_batch()
        self._note(event)
        if self.rank == 0:
            if self.settings.report.monitor:
                try:
                    self.deepspeed.monitor.write_events(rows(event, int(self.deepspeed.global_samples)))
                except Exception as error:  # a monitor's library may raise any exception; the switch is committed
                    logger.warning(
                        "switch %d was not written to DeepSpeed's monitors (%r); check the monitors that the "
                        "configuration enables",
                        *(event.generation, error),
                    )
            PROCESS.membership.tell(self, event)
        if event.outcome == "committed":
            if event.bytes_busiest and not preparation.proposal.late:  # late moves share the links with training
                self.bytes_per_second = event.bytes_busiest / (1e-3 * event.move_ms)
            for listener in self.switch_listeners:
                listener(event)

    def _event(
        self, preparation: Preparation, measured: Outcome, was: tuple[Layout, tuple[int, ...]], pause_ms: float
    ) -> SwitchEvent:
        """Return the event that describes a switch. Numbers of bytes are sums over all members; durations of phases are
        those of this member.

        was: layout and members before the switch.
        """
        proposal = preparation.proposal
        found: dict[str, Any] = measured.over_all or {**measured.measured(), **dict.fromkeys(SUMS, 0)}
        unknown: dict[str, Any] = {name: None for name, value in found.items() if value == UNKNOWN}
        certificate = None
        if measured.digest:
            certificate = CertificateSummary(len(self.host.model_map.tensors), measured.kinds, measured.digest)
        return SwitchEvent(
            outcome="committed" if measured.committed else "rolled_back",
            generation=proposal.generation,
            step=self.global_steps,
            source=Side(was[0].to_dict(), was[1]),
            target=Side(proposal.layout.to_dict(), proposal.members),
            **{**found, **unknown},
            predicted_move_ms=1e3 * found["bytes_busiest"] / self.bytes_per_second,
            phases_ms=measured.phases_ms,
            pause_ms=pause_ms,
            late_wait_ms=measured.late_wait_ms,
            cause=proposal.cause,
            predicted_gain=proposal.predicted_gain,
            certificate=certificate,
            reason=measured.reason,
            warnings=tuple(measured.warnings),
        )

    def _note(self, event: SwitchEvent, write: Write | None = EventWriter.write) -> None:
        """Record that a switch has ended with this event, also in the `PendingSwitch` that the user holds, and report
        it."""
        self.last_switch = event
        if self.pending is not None:
            self.pending.event = event
            self._answered, self.pending = self.pending, None
        self._tell(event, log_event, write)

    def _tell(self, event: SwitchEvent, log: Callable[[SwitchEvent], None], write: Write | None) -> None:
        """Report an event in the log and the report file. Does nothing except on rank 0.

        log: writes the event to the log.
        write: writes a line to the report file; None to write no line.
        """
        if self.rank != 0:
            return
        log(event)
        path = self.settings.report.jsonl
        if write is not None and path is not None:
            write(EventWriter(Path(path)), event)

    def give_up(self, reason: str) -> None:
        """Give up the switch that is being prepared, because it can no longer take place."""
        if self.preparation is not None:
            self._drop(self.preparation, reason, "rolled_back", write=None)

    def cancel(self) -> None:
        """Report the pending switch as cancelled, because the job ends before the switch could begin."""
        preparation = self.preparation
        if preparation is None:
            return
        if self.pending is None and preparation.board is not self.control:
            self.close_preparation()  # the script did not request this change of members
            return
        self._drop(preparation, "the job ended before a boundary came for it", "cancelled", EventWriter.write)

    def _drop(self, preparation: Preparation, reason: str, how: HowItEnded, write: Write | None) -> None:
        """Give up a preparation, and report a switch that has ended without a pause.

        how: how the switch has ended, such as "cancelled".
        write: writes a line to the report file; None to write no line.
        """
        self.close_preparation()
        event = self._event(preparation, Outcome(reason=reason), (self.layout, self.members), 0.0)
        self._note(replace(event, outcome=how), write)

    def note_first_step(self) -> None:
        """Add the time spent on recompilation to the last switch's event. Called after the first optimizer step since
        the switch.

        The new event replaces `last_switch` and the event of the pending switch; another line is written to the report
        file.
        """
        if not self._first_step_is_due:
            return
        self._first_step_is_due = False
        event = self.last_switch
        if event is None or not self.host.compilations.seconds:
            return
        self.last_switch = replace(event, recompile_ms=1e3 * self.host.compilations.seconds)
        if self._answered is not None and self._answered.event is event:
            self._answered.event = self.last_switch
        self._tell(self.last_switch, log_recompile, EventWriter.write_recompile)

    def note_gain(self, event: SwitchEvent, gain: float, slowdown_removed: float | None) -> None:
        """Report by which fraction a switch has reduced the step time. Called by the balancer once it has measured
        this.

        slowdown_removed: see `SwitchEvent`.

        If `last_switch` is that switch, it gets the new event; another line is written to the report file.
        """
        last = self.last_switch
        if last is not None and last.generation == event.generation:
            self.last_switch = replace(last, measured_gain=gain, slowdown_removed=slowdown_removed)
        event = replace(event, measured_gain=gain, slowdown_removed=slowdown_removed)
        self._tell(event, log_gain, EventWriter.write_gain)


def _raise(refusal: SwitchRefused) -> None:
    raise refusal
