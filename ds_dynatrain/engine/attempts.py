"""Switches that are on their way on one member: prepared, carried out or given up, and told of.

A number that was proposed is used up, whatever becomes of it: no key on the notice board is ever used again.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ds_dynatrain.adapters.memory import provide
from ds_dynatrain.adapters.state import Scalars
from ds_dynatrain.adapters.worlds import installed, stand_in_world
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints.fallback import Fallback
from ds_dynatrain.engine.lean import LeanTransaction
from ds_dynatrain.engine.meeting import Outcome
from ds_dynatrain.engine.pending import PendingSwitch
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.summary import event_of
from ds_dynatrain.engine.surroundings import Boards
from ds_dynatrain.engine.targets import Targets
from ds_dynatrain.engine.transaction import Transaction
from ds_dynatrain.report import EventWriter, SwitchEvent, log_event, log_recompile
from ds_dynatrain.space import Layout

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine

ASSUMED_BYTES_PER_SECOND = 1e9
"""Speed of a link that `estimate` reckons with before a switch has been measured."""

OnSwitch = Callable[[SwitchEvent], object]


class Attempts(Targets):
    """One at a time; `attempt` is the highest generation number that was ever proposed."""

    def __init__(self, engine: DynatrainEngine) -> None:
        super().__init__(engine)
        self.listeners: list[OnSwitch] = []
        self.attempt = 1
        self._pending: PendingSwitch | None = None
        self._answered: PendingSwitch | None = None
        self._first_step_is_due = False
        self._preparation: Preparation | None = None
        self._bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._fallback = Fallback(engine, engine.settings.fallback)

    @property
    def is_busy(self) -> bool:
        """Whether a switch is being prepared."""
        return self._preparation is not None

    def rehearse(self, layout: Layout, rank: int) -> None:
        """Build a layout's optimizer once, under a world without peers and over memory that is never touched.

        All that a first build imports and compiles is then there. For idle members; random streams are left as they
        were.
        """
        engine, before = self.engine, streams.capture()
        types = self.types(layout)
        empty = provide(engine.vps.local(layout, rank), types, set(), {}, _untouched)
        world = stand_in_world(rank, layout, engine.vps.ties(layout))
        with installed(world, engine.launch):
            engine.take_shape(engine.vps, layout, rank)
            engine.attach(layout, world, engine.config_for(layout), empty, Scalars())
            engine.detach()
        engine.leave_world()
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

        boards: where it is negotiated, if that is not the present generation's notice board. check: raises
        SwitchRefused, in the background, if this member cannot take part. nodes: of all members, if not all
        are in the present generation.
        """
        live = {} if self.engine.idle else self.engine.state_buffers()[0]
        self.settle_meshes(proposal)
        around, engine = self.engine.surroundings, self.engine
        front, back = (around.control, around.background) if boards is None else boards
        make, settings, types = engine.make_children, engine.settings, self.types(proposal.layout)
        budget, way = settings.memory_budget_bytes, settings.transport
        self._preparation = Preparation(proposal, front, back, engine.vps, live, types, make, budget, way)
        self._preparation.is_lean = self._is_lean
        self._preparation.own_count, self._preparation.number = len(engine.own_groups), engine.job.number
        self._preparation.has_sequence = engine.job.has_sequence
        mine, known = front.member, engine.candidates.nodes if nodes is None else nodes
        self._preparation.own = lambda: engine.own_groups.kinds(proposal.layout, proposal.members, known, mine)
        if check is not None:
            self._preparation.check = check
        engine.membership.guard(self._preparation)
        self.attempt = proposal.generation
        self._preparation.start()

    def transact(self, place: str) -> None:
        """Take part in the switch that was prepared."""
        begin, preparation = time.perf_counter(), self._prepared()
        was = self.engine.layout, self.engine.members
        with without_collection():
            kind = LeanTransaction if self._is_lean else Transaction
            outcome = kind(self.engine, preparation, place).run()
        self.note(preparation, outcome, was, begin)
        self.engine.membership.ended(self.engine, preparation.proposal, outcome)

    def transaction(self, place: str) -> Transaction:
        """One that the caller attempts and concludes, and notes; not for lean switches."""
        return Transaction(self.engine, self._prepared(), place)

    def _prepared(self) -> Preparation:
        if self._preparation is None:
            raise RuntimeError("no switch was prepared")
        return self._preparation

    def note(
        self, preparation: Preparation, outcome: Outcome, was: tuple[Layout, tuple[int, ...]], begin: float
    ) -> None:
        """A transaction has ended: tell all who want to know. was: layout and members before; begin: in seconds."""
        engine, self._preparation = self.engine, None
        if not engine.idle:
            self._fallback.settle()
        event = event_of(engine, preparation, outcome, was, 1e3 * (time.perf_counter() - begin))
        engine.last_switch, self._first_step_is_due = event, True
        engine.compilations.begin()
        if outcome.is_rebuilt and engine.compilations.count:
            engine.compilations.forget()  # after the pause was measured; compiling again is measured with it
        self._answer(event)
        if engine.rank == 0:
            log_event(event)
            if self._writer is not None:
                self._writer.write(event)
        if event.outcome == "committed":
            if event.bytes_sent:
                busiest = preparation.plans[outcome.kinds].bytes_busiest  # as `estimate` counts
                self._bytes_per_second = busiest / (1e-3 * event.phases_ms["move"])
            for listener in self.listeners:
                listener(event)

    def _answer(self, event: SwitchEvent) -> None:
        """Tell whoever asked for the switch how it went."""
        if self._pending is not None:
            self._pending.event = event
            self._answered, self._pending = self._pending, None

    def give_up(self, reason: str) -> None:
        """Let go of what is being prepared: it cannot come about any more, on no member."""
        preparation = self._preparation
        if preparation is None:
            return
        self.close()
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
        if event is None or not engine.compilations.seconds:
            return
        engine.last_switch = replace(event, recompile_ms=1e3 * engine.compilations.seconds)
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

    def begin_anew(self, generation: int) -> None:
        """What was pending or being prepared is void; numbers up to `generation` are used up."""
        self.close()
        self._pending = None
        self.attempt = max(self.attempt, generation)
        self._fallback.settle()

    def close(self) -> None:
        """Let go of whatever is being prepared."""
        if self._preparation is not None:
            self._preparation.abandon()
            self.attempt = self._preparation.proposal.generation
            self._preparation = None


def _untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages that are never there, and that no limit of this process's own memory counts."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)
