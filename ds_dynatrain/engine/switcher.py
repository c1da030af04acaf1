"""One member's part in switching: what is asked for, what is pending, and what happens at a boundary.

A working member comes by at every boundary; if a switch is pending and its step is reached, it takes part. An idle
member stays here, polling the notice board, until it works again or the job has ended.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.memory import dtypes, provide, sizes
from ds_dynatrain.adapters.offload import refuse_moved_states, working_bytes
from ds_dynatrain.adapters.optimizers import refuse_optimizer_layout
from ds_dynatrain.adapters.state import Scalars
from ds_dynatrain.adapters.support import refuse_changes, refuse_module
from ds_dynatrain.adapters.worlds import installed, stand_in_world
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.engine import agreement, feasible, registration, streams
from ds_dynatrain.engine.agreement import Proposal, Wish
from ds_dynatrain.engine.checkpoints import restore, stock
from ds_dynatrain.engine.checkpoints.fallback import Fallback
from ds_dynatrain.engine.checkpoints.restore import Restored
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.lean import LeanTransaction
from ds_dynatrain.engine.liveness import Watch
from ds_dynatrain.engine.meeting import Outcome
from ds_dynatrain.engine.members.changes import Changes
from ds_dynatrain.engine.members.elastic import Boards
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.summary import event_of
from ds_dynatrain.engine.transaction import Transaction
from ds_dynatrain.engine.turns import refuse_idle_target
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.plan import assign_slots, estimate, plan_switch
from ds_dynatrain.report import EventWriter, SwitchEvent, log_event, log_recompile
from ds_dynatrain.space import Layout, LocalSpace, is_partitioned
from ds_dynatrain.space.widened import is_widened
from ds_dynatrain.support import Target, refuse_layout

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine

IDLE_POLL_SECONDS = 0.02
ASSUMED_BYTES_PER_SECOND = 1e9
"""Speed that `estimate` reckons with before a switch has been measured."""

OnIdle = Callable[["DynatrainEngine"], object]
OnSwitch = Callable[[SwitchEvent], object]


class Switcher:
    """The switching half of an engine; `attempt` is the highest generation number that was ever proposed."""

    def __init__(self, engine: DynatrainEngine, on_idle: OnIdle | None) -> None:
        self.engine = engine
        self.listeners: list[OnSwitch] = []
        self.attempt = 1
        self._on_idle = on_idle
        self._asked: tuple[tuple[str, int], int] = (("", 0), 0)
        self._loads: tuple[int, int] = (0, 0)
        self._pending: PendingSwitch | None = None
        self._answered: PendingSwitch | None = None
        self._first_step_is_due = False
        self._preparation: Preparation | None = None
        self._watch = Watch(engine.control)
        elastic = engine.job.elastic
        self.changes = None if elastic is None else Changes.of_process(engine, elastic)
        self._bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._fallback = Fallback(engine, engine.settings.fallback)

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
        if self.changes is not None:
            self.changes.reopen(self.engine)
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
        before, now = (engine.layout, engine.members), engine.global_steps
        return wish, Proposal(self.attempt + 1, *before, target, members, at, now)

    def _checked(self, layout: Layout | None, changes: dict[str, int]) -> Layout:
        refuse_moved_states(self.engine)
        target = feasible.target_layout(self.engine.layout, layout, changes)
        processes = len(self.engine.candidates)
        refuse_idle_target(self.engine.turns, target, processes if self.changes is None else len(self.engine.members))
        self.check(target, processes)
        return target

    def check(self, target: Layout, processes: int) -> None:
        """SwitchRefused if so many processes cannot train this model in a layout."""
        engine = self.engine
        refuse_moved_states(engine)
        if not engine.idle:
            refuse_changes(engine)
        feasible.check_size(target, processes)
        feasible.check_batch(target, engine.batch_for(target), engine.module)
        self.check_features(target, processes)

    def check_features(self, target: Layout, processes: int | None = None) -> None:
        """SwitchRefused if the model or a key of the configuration cannot be had in a layout."""
        engine = self.engine
        processes = len(engine.candidates) if processes is None else processes
        feasible.check_combination(engine.job.features, target, processes)
        feasible.check_axes(engine.vps, target)
        config, optimizer = engine.job.user_config, engine.basic_optimizer
        refuse_module(engine.module, target, config)
        refuse_layout(Target(config, target, engine.layout, type(optimizer)))
        refuse_optimizer_layout(optimizer, config, target, engine.layout)
        try:
            engine.config_for(target)
        except Exception as error:  # DeepSpeed checks some keys against the stage, with whatever exception
            reason = f"DeepSpeed does not take this configuration in {target}: {type(error).__name__}: {error}"
            raise SwitchRefused(reason, "choose another stage, or change the key that it names") from error

    def register(self, groups: list[Mapping[str, Any]], window_is_open: bool) -> bool:
        """See `DynatrainEngine.register_parameters`."""
        layout = self.engine.layout
        if is_partitioned(layout):
            plain = layout.replace(pipe=1, expert=1, tensor=1, boundaries=None)
            raise SwitchRefused(f"{layout}: registering needs every tensor whole", f"switch to {plain} first")
        place, is_open = self._place_in_training(), self._in_the_way(window_is_open)
        return registration.register(self.engine, place, groups, is_open)

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

    def _slots(self, target: Layout) -> tuple[int, ...]:
        pool, engine = self.engine.candidates, self.engine
        able = engine.members if self.changes is not None and engine.turns.is_shared else pool.members
        return assign_slots(engine.vps, target, able, pool.nodes)

    def needs(self, target: Layout, members: tuple[int, ...]) -> dict[int, int]:
        """Bytes that each member allocates, at most: the target's buffers and staging; if lean, less its source."""
        vps, budget = self.engine.vps, self.engine.settings.memory_budget_bytes
        differ = any(is_widened(kind, layout) for kind in vps.kinds for layout in (target, vps.layout))
        known: dict[tuple[Layout, int, int], int] = {}

        def held(layout: Layout, rank: int) -> int:
            local = vps.local(layout, rank)
            alike = layout, id(local.line), local.zero_rank if differ else 0  # ranks with one line need the same
            if alike not in known:
                known[alike] = self._state_bytes(local)
            return known[alike]

        needs: dict[int, int] = {}
        for rank, member in enumerate(members):
            size = held(target, rank)
            is_freed = self._is_lean and member in vps.members
            freed = held(vps.layout, vps.members.index(member)) if is_freed else 0
            needs[member] = max(0, size - freed) + min(budget, size)
        return needs

    def _state_bytes(self, local: LocalSpace) -> int:
        """Bytes of all buffers of a rank."""
        types, accumulates = self.types(local.layout), self.engine.batch_for(local.layout).accumulation > 1
        state = sum(size * types[kind].itemsize for (kind, _), size in sizes(local).items())
        offloads = self.engine.zero_use_cpu_optimizer()
        return state + (working_bytes(local, types["weight"], accumulates) if offloads else 0)

    def types(self, layout: Layout) -> dict[str, torch.dtype]:
        """Element type of each state kind under a layout."""
        return dtypes(self.engine.element_types, self.engine.vps.present_kinds(layout))

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def see_failure(self) -> None:
        """Where members come and go: form a new world if a collective of the script's own has failed."""
        if self.changes is not None:
            self.changes.forming.see_failure()

    def stand_at(self, place: str, window_is_open: bool) -> None:
        """A boundary: take part in a switch that is due. An idle member returns only when it works."""
        self.engine._has_stood = True
        self.engine.saver.look()
        if self.changes is not None:
            self.changes.stand(self.engine, place, window_is_open)
            return
        if not self.engine.idle:
            if not window_is_open:
                self.save_if_due()
            if window_is_open or not self.is_due():
                return
            self.transact(place)
        if self.engine.idle:
            self._wait_for_work(place)
            self.settle_fallback()

    def save_if_due(self) -> None:
        """On a working member, at a boundary: the fallback checkpoint."""
        self._fallback.stand_at()

    def save_now(self) -> None:
        """Before all working members end: a fallback checkpoint, if there is to be any."""
        self._fallback.save_now()

    def save_beside(self, tag: str, key: str, in_background: bool) -> None:
        """The fallback checkpoint of a moment of all engines."""
        self._fallback.save_beside(tag, key, in_background)

    def stop_listening(self) -> None:
        """SIGTERM is the user's own affair again."""
        self._fallback.stop()

    def settle_fallback(self) -> None:
        """The state was put together just now: no fallback checkpoint is due before the next step."""
        self._fallback.settle()

    @property
    def _is_lean(self) -> bool:
        """Whether a switch lets go of the source before it takes the target."""
        return bool(self.engine.settings.safety == "lean")

    @property
    def is_busy(self) -> bool:
        """Whether a switch is being prepared."""
        return self._preparation is not None

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

    def _wait_for_work(self, place: str) -> None:
        """Poll the notice board until this member works; run the user's `on_idle` in between.

        SystemExit(0) when the working members' scripts have ended.
        """
        self.engine.close_loaders()  # their processes must not outlive the world that they fetched for
        while self.engine.idle:
            self.look_for_proposal()
            self.meet_idle(place)
            if self.engine.idle:
                self._look_for_the_end()
                self.pass_time(IDLE_POLL_SECONDS)

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
                if self.changes is not None:
                    self.changes.retrain(proposal.members)

    def _look_for_the_end(self) -> None:
        """Leave when the job has ended."""
        if self._watch.look(self.engine.members):
            self.close()
            self.control.post(f"left/{self.control.member}", True)
            raise SystemExit(0)

    def _see_given_up(self) -> None:
        """Let go of a preparation that was given up before the meeting."""
        if self._preparation is not None:
            record = self.control.read(f"record/{self._preparation.proposal.generation}")
            if record is not None and not record["commit"]:
                self.close()

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
        for layout in (proposal.source_layout, proposal.layout):
            self.engine.vps.mesh(layout)  # here: asking DeepSpeed how it cuts is not for a thread
        around, engine = self.engine.surroundings, self.engine
        front, back = (around.control, around.background) if boards is None else boards
        make, settings, types = engine.make_children, engine.settings, self.types(proposal.layout)
        budget, way = settings.memory_budget_bytes, settings.transport
        self._preparation = Preparation(proposal, front, back, engine.vps, live, types, make, budget, way)
        self._preparation.is_lean = self._is_lean
        self._preparation.own_count, self._preparation.number = len(engine.own_groups), engine.job.number
        mine, known = front.member, engine.candidates.nodes if nodes is None else nodes
        self._preparation.own = lambda: engine.own_groups.kinds(proposal.layout, proposal.members, known, mine)
        if check is not None:
            self._preparation.check = check
        if self.changes is not None:
            self.changes.guard(self._preparation)
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
        if self.changes is not None:
            self.changes.after(self.engine, preparation.proposal, outcome)

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
                self._bytes_per_second = event.bytes_sent / (1e-3 * event.phases_ms["move"])
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
