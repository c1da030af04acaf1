"""Switches that are on their way on one member: prepared, carried out or given up, and told of.

A number that was proposed is used up, whatever becomes of it: no key on the board is ever used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ds_dynatrain.adapters.device import compute_device
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
from ds_dynatrain.engine.summary import event_of
from ds_dynatrain.engine.transaction.lean import LeanTransaction
from ds_dynatrain.engine.transaction.meeting import Outcome
from ds_dynatrain.engine.transaction.switch import Transaction
from ds_dynatrain.report import EventWriter, SwitchEvent, log_event, log_recompile, logger
from ds_dynatrain.space import Layout
from ds_dynatrain.support.proved import warning

ASSUMED_BYTES_PER_SECOND = 1e9
"""Speed of a link that `estimate` reckons with before a switch has been measured."""

OnSwitch = Callable[[SwitchEvent], object]


def parts_in_use(engine: EngineCore, proposal: Proposal) -> list[str]:
    """The parts of `support.proved` that a switch of this job goes through."""
    layouts = (proposal.source_layout, proposal.layout)
    wide = {axis for layout in layouts for axis, size in layout.axes().items() if size > 1}
    used = {
        "members": len(engine.candidates) > min(layout.world_size for layout in layouts),
        "offload": engine.deepspeed.zero_use_cpu_optimizer(),
        "compile": bool(engine.host.compiled_modules),
        "fused": any(group.get("fused") for group in engine.host.basic_optimizer.param_groups),
        "engines": PROCESS.is_shared,
        **{axis: axis in wide for axis in ("pipe", "tensor", "expert", "sequence")},
    }
    return ["groups", "stages", *(part for part, is_used in used.items() if is_used)]


class Attempts:
    """Those of one engine, one at a time. listeners: the user's, called after each that was committed."""

    def __init__(self, engine: EngineCore, saver: Saver) -> None:
        self.engine, self._saver = engine, saver
        self.listeners: list[OnSwitch] = []
        self.bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._answered: PendingSwitch | None = None
        self._first_step_is_due = False
        self._has_warned = False

    def rehearse(self, layout: Layout, rank: int) -> None:
        """Build a layout's optimizer once, under a world without peers and over memory that is never touched.

        All that a first build imports and compiles is then there. For idle members; random streams are left as they
        were.
        """
        engine, before = self.engine, streams.capture()
        memory = engine.memory_in(layout)
        empty = provide(engine.vps.local(layout, rank), memory, set(), {}, Untouched())
        world = stand_in_world(rank, layout, engine.vps.ties(layout))
        with installed(world, engine.launch):
            engine.take_shape(engine.vps, layout, rank)
            engine.host.attach(layout, world, engine.config_for(layout), empty, Scalars())
            engine.host.detach()
        engine.host.leave_world()
        streams.restore(before)

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
    ) -> None:
        """Make ready, in the background, for what was proposed.

        boards: where it is negotiated, if that is not the present generation's board. check: raises
        SwitchRefused, in the background, if this member cannot take part. nodes: of all members, if not all
        are in the present generation.
        """
        self._warn_of_hardware(proposal)
        engine, around = self.engine, self.engine.context
        live = {} if engine.idle else engine.host.state_buffers()[0]
        self.settle_meshes(proposal)
        front, back = (around.control, around.background) if boards is None else boards
        make, settings, memory = engine.host.make_children, engine.settings, engine.memory_in(proposal.layout)
        budget, way = settings.memory_budget_bytes, settings.transport
        preparation = Preparation(proposal, front, back, engine.vps, live, memory, make, budget, way)
        preparation.is_lean = engine.is_lean
        preparation.own_count, preparation.number = len(engine.own_groups), engine.job.number
        preparation.has_sequence = engine.job.has_sequence
        mine, known = front.member, engine.candidates.nodes if nodes is None else nodes
        preparation.own = lambda: engine.own_groups.kinds(proposal.layout, proposal.members, known, mine)
        if check is not None:
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

    def transact(self, place: str) -> None:
        """Take part in the switch that was prepared."""
        begin, engine, preparation = time.perf_counter(), self.engine, self._prepared()
        was = engine.layout, engine.members
        with without_collection():
            if engine.is_lean:
                outcome = LeanTransaction(engine, preparation, place, self._saver).run()
            else:
                outcome = Transaction(engine, preparation, place).run()
        self.note(preparation, outcome, was, begin)
        PROCESS.membership.ended(engine, preparation.proposal, outcome)

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
        event = event_of(engine, preparation, outcome, was, 1e3 * (time.perf_counter() - begin))
        engine.last_switch, self._first_step_is_due = event, True
        engine.host.compilations.begin()
        if outcome.is_rebuilt and engine.host.compilations.count:
            engine.host.compilations.forget()  # after the pause was measured; compiling again is measured with it
        self._answer(event)
        if engine.rank == 0:
            log_event(event)
            if self._writer is not None:
                self._writer.write(event)
        if event.outcome == "committed":
            if event.bytes_sent:
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
        preparation = self.engine.preparation
        if preparation is None:
            return
        self.engine.close_preparation()
        was = self.engine.layout, self.engine.members
        event = event_of(self.engine, preparation, Outcome(reason=reason), was, 0.0)
        self.engine.last_switch = event
        self._answer(event)
        if self.engine.rank == 0:
            log_event(event)

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
        if engine.rank == 0:
            log_recompile(engine.last_switch)
            if self._writer is not None:
                self._writer.write_recompile(engine.last_switch)

    @property
    def _writer(self) -> EventWriter | None:
        path = self.engine.settings.report.jsonl
        return None if path is None else EventWriter(Path(path))
