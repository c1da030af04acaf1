"""Switches that are on their way on one member: prepared, carried out or given up, and told of.

A number that was proposed is used up, whatever becomes of it: no key on the board is ever used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ds_dynatrain.adapters.device import HOST, compute_device
from ds_dynatrain.adapters.memory import Untouched, provide
from ds_dynatrain.adapters.state import Scalars
from ds_dynatrain.adapters.worlds import installed, stand_in_world
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.context import Boards
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.pending import PendingSwitch
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.telling import Telling
from ds_dynatrain.engine.transaction.lean import LeanTransaction
from ds_dynatrain.engine.transaction.meeting import Outcome, connect_ahead, event_of
from ds_dynatrain.engine.transaction.switch import Transaction
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.report import Outcome as HowItEnded
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.space import Layout
from ds_dynatrain.support.proved import warning

ASSUMED_BYTES_PER_SECOND = 1e9
"""Speed of a link that `estimate` reckons with before a switch has been measured."""

OnSwitch = Callable[[SwitchEvent], object]


def parts_in_use(engine: EngineCore, proposal: Proposal) -> list[str]:
    """The parts of `support.proved` that a switch of this job goes through."""
    layouts = (proposal.source_layout, proposal.layout)
    wide = {axis for layout in layouts for axis, size in layout.axes().items() if size > 1}
    transport, machines = engine.settings.transport, set(engine.candidates.nodes.values())
    used = {
        "batches": transport == "nccl" or (transport == "auto" and len(machines) > 1),
        "late": proposal.late,
        "members": len(engine.candidates) > min(layout.world_size for layout in layouts),
        "offload": engine.deepspeed.zero_use_cpu_optimizer(),
        "compile": bool(engine.host.compiled_modules),
        "fused": any(group.get("fused") for group in engine.host.basic_optimizer.param_groups),
        "engines": PROCESS.is_shared,
        **{axis: axis in wide for axis in ("pipe", "tensor", "expert", "sequence")},
    }
    return ["groups", "stages", *(part for part, is_used in used.items() if is_used)]


@dataclass(frozen=True)
class _Entered:
    """A late switch between its two votes. was: layout and members before it; begin: in seconds."""

    transaction: Transaction
    was: tuple[Layout, tuple[int, ...]]
    begin: float


class Attempts:
    """Those of one engine, one at a time. listeners: the user's, called after each that was committed.

    note_window, discard_window: remember where a global batch begins, and go back there.
    """

    def __init__(
        self,
        engine: EngineCore,
        saver: Saver,
        note_window: Callable[[], None],
        discard_window: Callable[[], None],
    ) -> None:
        self.engine, self._saver, self._telling = engine, saver, Telling(engine)
        self._note_window, self._discard_window = note_window, discard_window
        self._entered: _Entered | None = None
        self.listeners: list[OnSwitch] = []
        self.bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._answered: PendingSwitch | None = None
        self._first_step_is_due = False
        self._has_warned = self._has_told_of_batch = False

    def rehearse(self, layout: Layout, rank: int) -> SwitchRefused | None:
        """Build a layout's optimizer once, under a world without peers and over memory that is never touched.

        All that a first build imports and compiles is then there. Called on idle members, whose random streams stay as
        they were. Return why the layout cannot be built here, for the vote of the switch; None if it can.
        """
        engine, before = self.engine, streams.capture()
        try:
            memory = engine.memory_in(layout)
            empty = provide(engine.vps.local(layout, rank), memory, set(), {}, Untouched())
            world = stand_in_world(rank, layout, engine.vps.ties(layout))
            with installed(world, engine.launch):
                engine.take_shape(engine.vps, layout, rank)
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

    def settle_meshes(self, proposal: Proposal) -> None:
        """Learn now how DeepSpeed cuts in both layouts: asking it is not for a thread."""
        for layout in (proposal.source_layout, proposal.layout):
            self.engine.vps.mesh(layout)

    def prepare(
        self,
        proposal: Proposal,
        boards: Boards | None = None,
        check: Callable[[], None] | None = None,
        nodes: Mapping[int, str] | None = None,
        refusal: SwitchRefused | None = None,
    ) -> None:
        """Make ready, in the background, for what was proposed.

        boards: where it is negotiated, if that is not the present generation's board. check: raises
        SwitchRefused, in the background, if this member cannot take part. nodes: of all members, if not all
        are in the present generation. refusal: why this member cannot take part, if that is known already.
        """
        self._warn_of_hardware(proposal)
        engine, around = self.engine, self.engine.context
        live = {} if engine.idle else engine.host.state_buffers()[0]
        self.settle_meshes(proposal)
        front, back = (around.control, around.background) if boards is None else boards
        make, settings, memory = engine.host.make_children, engine.settings, engine.memory_in(proposal.layout)
        budget, way = settings.memory_budget_bytes, settings.transport
        preparation = Preparation(proposal, front, back, engine.vps, live, memory, make, budget, way)
        present = engine.memory_in(proposal.source_layout)
        preparation.on_device = frozenset(kind for kind, held in present.items() if held.place.device != HOST)
        preparation.is_lean, preparation.present = engine.is_lean, engine.world
        preparation.own_count, preparation.number = len(engine.own_groups), engine.job.number
        preparation.apart = engine.own_groups.of_all
        preparation.has_sequence = engine.job.has_sequence
        mine, known = front.member, engine.candidates.nodes if nodes is None else nodes
        preparation.own = lambda: engine.own_groups.kinds(proposal.layout, proposal.members, known, mine)
        if refusal is not None:
            preparation.check = partial(_raise, refusal)
        elif check is not None:
            preparation.check = check
        PROCESS.membership.guard(preparation)
        engine.preparation, engine.attempt = preparation, proposal.generation
        preparation.start()

    def _warn_of_hardware(self, proposal: Proposal) -> None:
        """Once, on rank 0, what of this job never ran on such an accelerator."""
        if self._has_warned or self.engine.rank != 0:
            return
        self._has_warned = True
        said = warning(compute_device().type, parts_in_use(self.engine, proposal))
        if said:
            logger.warning(said)

    def tell_of_batch(self) -> None:
        """Warn, once, on rank 0, where the present layout cuts a global batch into micro-batches of one sample."""
        engine = self.engine
        if self._has_told_of_batch or engine.idle or engine.rank != 0:
            return
        notice = engine.batch_for(engine.layout).notice
        if notice:
            self._has_told_of_batch = True
            logger.warning("%s", notice)

    def connect_ahead(self) -> None:
        """Connect the next world's members at a boundary before that of the switch; if that fails, it is given up."""
        decision = connect_ahead(self._prepared(), self.engine.world)
        if not decision.commit:
            self.give_up(decision.reason)
        decision.raise_interrupt()

    def transact(self, place: str) -> None:
        """Take part in the switch that was prepared."""
        begin, engine, preparation = time.perf_counter(), self.engine, self._prepared()
        was = engine.layout, engine.members
        if preparation.proposal.late:
            self._enter(_Entered(Transaction(engine, preparation, place), was, begin))
            return
        with without_collection():
            if engine.is_lean:
                outcome = LeanTransaction(engine, preparation, place, self._saver).run()
            else:
                outcome = Transaction(engine, preparation, place).run()
        self.note(preparation, outcome, was, begin)
        PROCESS.membership.ended(engine, preparation.proposal, outcome)

    def _enter(self, entered: _Entered) -> None:
        """The pause of a late switch; on a member that does not train in the new world all of it."""
        transaction, self._entered = entered.transaction, entered
        self.engine.late_worlds = transaction.worlds
        with without_collection():
            goes_on = transaction.enter(self._discard_window)
        self.engine.late_worlds = transaction.worlds
        if transaction.has_entered:
            PROCESS.membership.entered(self.engine)
        if not goes_on:
            self.settle()
            return
        self.engine.awaits_late = True
        self._note_window()
        self._compile_anew()
        transaction.outcome.pause_ms = 1e3 * (time.perf_counter() - entered.begin)

    def settle(self) -> bool:
        """Before an optimizer step: whether it may be. Not if late kinds did not come: then this batch is void."""
        entered, self._entered = self._entered, None
        if entered is None:
            return True
        begin, transaction = time.perf_counter(), entered.transaction
        try:
            outcome = transaction.settle()
        finally:
            self.engine.awaits_late, self.engine.late_worlds = False, ()
        outcome.late_wait_ms = 1e3 * (time.perf_counter() - begin)
        self.note(transaction.preparation, outcome, entered.was, entered.begin)
        PROCESS.membership.ended(self.engine, transaction.proposal, outcome)
        return outcome.committed

    @property
    def entered_at(self) -> str:
        """The place at which a late switch, whose record is not written, was entered."""
        return "" if self._entered is None else self._entered.transaction.place

    def give_up_late(self, reason: str) -> None:
        """Go back to the world before a late switch whose record is not written."""
        if self._entered is not None:
            self._entered.transaction.give_up(reason)
            self.settle()

    def _compile_anew(self) -> None:
        """What was compiled went over the old optimizer; compiling again is measured with it, after the pause."""
        compilations = self.engine.host.compilations
        compilations.begin()
        if compilations.count:
            compilations.forget()

    def transaction(self, place: str, is_part: bool) -> Transaction:
        """One that the caller votes in, concludes and notes; not for lean switches. is_part: see `Transaction`."""
        return Transaction(self.engine, self._prepared(), place, is_part)

    def _prepared(self) -> Preparation:
        if self.engine.preparation is None:
            raise RuntimeError("no switch was prepared")
        return self.engine.preparation

    def note(
        self, preparation: Preparation, outcome: Outcome, was: tuple[Layout, tuple[int, ...]], begin: float
    ) -> None:
        """A transaction has ended: tell all who want to know. was: layout and members before; begin: in seconds."""
        engine, self.engine.preparation = self.engine, None
        if not engine.idle:
            (engine.settle_state if outcome.committed else engine.settle_fallback)()
        pause_ms = 1e3 * (time.perf_counter() - begin) if outcome.pause_ms is None else outcome.pause_ms
        event = event_of(engine, preparation, outcome, was, pause_ms)
        engine.last_switch, self._first_step_is_due = event, True
        if not outcome.is_rebuilt:
            engine.host.compilations.begin()
        elif outcome.pause_ms is None or not outcome.committed:  # else it was done at the end of the pause
            self._compile_anew()
        self.tell_of_batch()
        self._answer(event)
        self._telling.switched(event)
        if event.outcome == "committed":
            if event.bytes_sent and not preparation.proposal.late:
                busiest = preparation.figures(outcome.kinds).busiest_bytes  # as `estimate` counts
                self.bytes_per_second = busiest / (1e-3 * event.phases_ms["move"])
            for listener in self.listeners:
                listener(event)

    def _answer(self, event: SwitchEvent) -> None:
        """Tell whoever asked for the switch how it went."""
        pending = self.engine.pending
        if pending is not None:
            pending.event = event
            self._answered, self.engine.pending = pending, None

    def give_up(self, reason: str) -> None:
        """Let go of what is being prepared: it cannot come about any more, on no member."""
        if self.engine.preparation is not None:
            self._telling.given_up(self._drop(self.engine.preparation, reason, "rolled_back"))

    def cancel(self) -> None:
        """The job ends: what was asked for, and what no boundary has come for, is told of as any switch is."""
        preparation = self.engine.preparation
        if preparation is None:
            return
        if self.engine.pending is None and preparation.board is not self.engine.control:
            self.engine.close_preparation()  # a change of members, which nobody has asked for here
            return
        self._telling.cancelled(self._drop(preparation, "the job ended before a boundary came for it", "cancelled"))

    def _drop(self, preparation: Preparation, reason: str, how: HowItEnded) -> SwitchEvent:
        """Let go of what is being prepared; what is told of it, with no pause."""
        self.engine.close_preparation()
        was = self.engine.layout, self.engine.members
        event = replace(event_of(self.engine, preparation, Outcome(reason=reason), was, 0.0), outcome=how)
        self.engine.last_switch = event
        self._answer(event)
        return event

    def note_first_step(self) -> None:
        """After an optimizer step: if it was the first one since a switch, what it compiled again goes into the event.

        `last_switch` and the pending switch get the new event, the file a line of its own.
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
        self._telling.recompiled(engine.last_switch)

    def note_gain(self, event: SwitchEvent, gain: float) -> None:
        """A later window has measured what a switch was worth, as a share of a step; `last_switch`, if it is that one,
        gets the new event, the file a line of its own."""
        engine, known = self.engine, replace(event, measured_gain=gain)
        if engine.last_switch is not None and engine.last_switch.generation == event.generation:
            engine.last_switch = replace(engine.last_switch, measured_gain=gain)
        self._telling.gained(known)

    def withdraw(self, reason: str) -> None:
        """Let go of a pending switch, on all working members at the same place; the idle ones read it on the board."""
        preparation = self._prepared()
        if self.engine.rank == 0:
            preparation.board.decide(f"record/{preparation.proposal.generation}", {"commit": False, "reason": reason})
        self.give_up(reason)


def _raise(refusal: SwitchRefused) -> None:
    raise refusal
