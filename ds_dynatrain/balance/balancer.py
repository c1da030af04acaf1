"""The balancer of a job: it times layers and members, and proposes or makes moves to faster layouts.

Layers are timed in windows (a number of steps), which all members begin at the same step. At the end of a window each
member sends its timings to the first member of the world. The first member merges them with the earlier windows into
one profile, and decides. All members use its answer, including those that have just joined.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.model.stage_module import PipelineShaper
from ds_dynatrain.balance.adapters.expert_meter import ExpertMeter
from ds_dynatrain.balance.adapters.timing import StageTimes, Timer, children_of
from ds_dynatrain.balance.advice import Advice, MoveCost, Situation, advise
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.course import ENOUGH_STEPS, Course, WantedMove
from ds_dynatrain.balance.decision import Pause
from ds_dynatrain.balance.experts import busiest
from ds_dynatrain.balance.partition import PLENTY
from ds_dynatrain.balance.profile import BESIDE, ExpertRows, Profile
from ds_dynatrain.balance.timed_model import TimedModel, TimedStages
from ds_dynatrain.balance.window import (
    PASSES,
    Averaged,
    Busy,
    ExpertTimes,
    Measured,
    Rows,
    StepSeconds,
    TimingWindow,
    waiting,
)
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.switcher import Reason
from ds_dynatrain.errors import ConfigError, MemberMissing, ProfileError, SwitchRefused, WorldChanged
from ds_dynatrain.extension import around
from ds_dynatrain.membership.session import Session, ask_for_different_things
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.reshard.pending import PendingSwitch
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.space import Layout

CAUSE = "balance"


SETTLING = 2
"""Number of steps that are not timed after a change of members or layout, or after state was loaded.

The first steps after such a change are slow, because they use new memory.
"""
ASSUMED_PAUSE_SECONDS = 0.2
"""Seconds that a switch is assumed to take in addition to the transfer, until a switch has been measured."""


class Balancer:
    """`engine.balancer`, which exists if the `dynatrain` block has a `balance` block.

    profile: the result of all windows so far, the same on all working members; None until the first window has ended.
    busy: how long the ranks computed in the last window, the same on all working members; None until the first window
        has ended.
    saved_member_seconds: the time for which the balancer's moves have kept members free. Each step adds its seconds
        times the number of members that such a move made idle and that have not worked since, even if they have left
        the job.
    """

    profile: Profile | None = None
    busy: Busy | None = None
    saved_member_seconds = 0.0

    def __init__(self, engine: EngineParts, settings: BalanceConfig) -> None:
        self._engine, self._settings = engine, settings
        has_stages = isinstance(engine.host.shaper, PipelineShaper)
        self._model = TimedStages(engine) if has_stages else TimedModel(engine)
        self._course = Course()
        """The record of moves, which is the same on all working members, so that all of them request a switch at the
        same step."""
        self._asked: tuple[WantedMove, PendingSwitch, Layout] | None = None
        """The move in progress: the wanted move, its switch, and the layout before it."""
        self._open: SwitchEvent | None = None
        """The event of the last move, until a window of timed steps has shown whether it paid off."""
        self._switches: list[tuple[int, float]] = []
        self._averaged: Averaged | None = None
        self._pause = Pause(ASSUMED_PAUSE_SECONDS, 0.0)
        self._timer: Timer | None = None
        self._meter: ExpertMeter | None = None
        """The meter of experts, which counts from the first step after the last window; None without it."""
        self._steps, self._began = StepSeconds(), 0.0
        self._step_seconds = 0.0
        """Step time in seconds of the slowest member in the last window; the same on all members."""
        self._shared: Session | None = None
        """The session in which the last window's timings were exchanged."""
        self._left = self._opened = 0
        """Number of steps left in the current timing window, and the step at which this window was due."""
        self._at: tuple[str, int] = ("", 0)
        """The segment of training at the last step, and how often the set of trained parameters had changed by then."""
        self._settled = self._next = 0
        """The first step that may be timed, and the step at which the next timing window is due."""
        self._are_new = False
        """Whether it is already known that the costs of layers have changed since the earlier windows."""
        self._noted: tuple[str, int] = ("", 0)
        """The segment and micro-step of the last call of `note`, and the number of calls at that micro-step."""
        engine.switch_listeners.append(self._note_switch)

    # ---- what a user calls -------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Declare that the costs of layers have just changed. The next step is timed; earlier measurements no longer
        count.

        Call this on every working member at the same step. If some members have not called it within half of
        `timeout_seconds`, the others raise a ConfigError that names those members: they are already in the next step
        and will no longer call it.

        text: a note for the log.
        """
        engine = self._engine
        if engine.idle:
            raise ConfigError("balancer.note: this member is idle and times nothing; call it on the working members")
        place = f"{engine.segment}/{engine.micro_steps}"
        self._noted = place, self._noted[1] + 1 if self._noted[0] == place else 1
        key = f"note/{place}/{self._noted[1]}"
        what, begin = f"balancer.note({text!r})", time.monotonic()

        def stop() -> None:
            if (waited := time.monotonic() - begin) > engine.settings.timeout_seconds / 2:
                raise MemberMissing(what, (), waited)

        session = Session(engine.control, key, engine.members, what, stop=stop)
        asked = {"step": engine.global_steps}
        session.agree(asked, lambda *said: ConfigError("; ".join(said)), ask_for_different_things)
        self._are_new, self._next, self._timer, self._meter = True, engine.global_steps, None, None
        self._steps.forget()
        if engine.rank == 0:
            logger.info("balance: %s: layers are timed at the next step", text)

    def expect_new_costs(self) -> None:
        """Discard earlier timings and time steps again soon, because costs have just changed on all working members.

        Unlike `note` this does not communicate: all working members call it after the same step.
        """
        self._are_new, self._timer = True, None
        self._settled = self._next = self._engine.global_steps + SETTLING
        self._steps.forget()

    def meter(self, names: Sequence[str]) -> None:
        """Time the modules of these names apart from the rest of the model. `engine.meter` calls this.

        Raises ConfigError once the first window has begun, or if one of the modules cannot be timed.
        """
        if self._timer is not None or self.profile is not None:
            raise ConfigError("engine.meter: the first window has begun; call it before training begins")
        if isinstance(self._engine.host.shaper, PipelineShaper):
            raise ConfigError("engine.meter: the layers of a PipelineModule are timed as they are; leave the call out")
        children_of(self._engine.host.module, names)
        self._model = TimedModel(self._engine, names)

    def advise(self) -> Advice:
        """Return the best layout of the current members, and whether a move would pay.

        Communicates nothing and changes nothing. The proposal is the same on all working members.

        Raises ProfileError before a window has ended in a world of the current sizes, and LayoutError if nothing fits
        into `memory_limit_bytes`.
        """
        engine, profile = self._engine, self.profile
        if engine.idle or profile is None or self._averaged is None:
            why = "this member is idle" if engine.idle else f"the first window begins at step {self._due}"
            raise ProfileError(
                f"balancer.advise: nothing was measured yet: {why}; call it on a working member, after step {self._due}"
            )
        if len(profile.speeds) != engine.layout.world_size:
            raise ProfileError(
                f"balancer.advise: the profile is of {len(profile.speeds)} members, and {engine.layout.world_size} "
                f"work now; call it after the next window, which begins at step {self._due}"
            )
        course = self._course.at(engine.global_steps, self._averaged.since, self._course.slow)
        advice = self._advise(profile, self._step_seconds, course)
        return replace(advice, saved_member_seconds=self.saved_member_seconds)

    def _advise(self, profile: Profile, step_seconds: float, course: Course) -> Advice:
        engine, settings = self._engine, self._settings
        counted = course.slow.counted(engine.global_steps, settings.slow_seen_steps)
        at = Situation(
            present=self._model.present,
            accumulation=lambda layout: engine.batch_for(layout).accumulation,
            step=engine.global_steps,
            history=course.history,
            rules=settings,
            memory_bytes=settings.memory_limit_bytes or PLENTY,
            shape=settings.shape,
            slow=frozenset(rank for rank, member in enumerate(engine.members) if member in counted),
            spares=len({*PROCESS.membership.able(engine)} - {*engine.members, *course.let_go}),
            vacant=sum(map(len, PROCESS.membership.vacant(engine).values())),
            pause_seconds=self._pause.fixed_seconds,
            step_seconds=step_seconds,
            pipeline=engine.job.has_stages,
            slowdown=course.slowdown,
        )
        return advise(profile, at, self._move_to)

    def _move_to(self, layout: Layout, without: tuple[int, ...]) -> MoveCost | None:
        """Return the cost of moving to a layout without some ranks; None if a switch would be refused."""
        members = (*self._course.let_go, *(self._engine.members[rank] for rank in without))
        estimate = self._engine.estimate(layout, {}, members)
        return None if estimate.refusal else MoveCost(estimate.bytes_sent, self._pause.seconds(estimate.bytes_sent))

    @property
    def _due(self) -> int:
        return max(self._next, self._settled)

    # ---- moves -------------------------------------------------------------------------------------------------------

    def _follow(self, course: Course) -> None:
        """Adopt the decisions that all members share at the end of a timing window, and request the wanted move."""
        engine, self._course = self._engine, course
        logger.debug("balance: step %d: %s", engine.global_steps, course.why or "nothing was decided")
        if course.gain is not None and self._open is not None:
            slowdown = course.slowdown
            engine.note_gain(self._open, course.gain, None if slowdown is None else slowdown.removed)
        if course.verdict is not None:
            self._open = None
        if course.wanted is not None and self._asked is None:
            self._move(course.wanted)
        elif course.releases and engine.rank == 0:
            nodes = PROCESS.membership.vacant(engine)
            logger.info("balance: nodes without work leave: %s: %s", ", ".join(nodes), course.why)
            PROCESS.membership.release(tuple(nodes))

    def _move(self, wanted: WantedMove) -> None:
        engine = self._engine
        let_go = () if wanted.back else self._course.let_go
        without = (*let_go, *(engine.members[rank] for rank in wanted.without))
        reason = Reason(CAUSE, wanted.predicted_gain, without)
        try:
            pending = engine.ask_for_switch(wanted.layout, None, {}, late=False, reason=reason)
        except SwitchRefused as refusal:  # for example, the script has a switch pending, or members change
            self._put_off(str(refusal))
            return
        self._asked = wanted, pending, self._model.present
        if engine.rank == 0:
            logger.info("balance: %s %s: %s", "back to" if wanted.back else "to", wanted.layout, wanted.why)

    def _put_off(self, reason: str) -> None:
        self._course = self._course.failed(self._engine.global_steps)
        if self._engine.rank == 0:
            logger.info("balance: nothing moves for now: %s", reason)

    def _note_switch(self, event: SwitchEvent) -> None:
        """Record a committed switch. If it is not the balancer's own, the gain of the last move can no longer be
        measured.
        """
        self._switches.append((event.bytes_sent, 1e-3 * event.pause_ms))
        if self._asked is None or event.generation != self._asked[1].generation:
            sizes = (len(side.members) for side in (event.target, event.source))
            self._open, self._course = None, self._course.overtaken(event.step, *sizes)
            return
        (wanted, _, left), self._asked = self._asked, None
        let_go = (*self._course.let_go, *(event.source.members[rank] for rank in wanted.without))
        course = self._course.moved(wanted, event.step, left, 1e-3 * event.pause_ms)
        self._course, self._open = replace(course, let_go=() if wanted.back else let_go), event

    # ---- windows -----------------------------------------------------------------------------------------------------

    def timed_step(self) -> AbstractContextManager[None]:
        """Return a context manager that times a whole step if a timing window is open.

        Used by engines whose step is one call.
        """
        self._begin_step()
        return nullcontext() if self._timer is None else self._with_experts(self._timer.timing())

    def timed_pass(self, is_backward: bool) -> AbstractContextManager[None]:
        """Return a context manager that times a pass if a timing window is open.

        Used by engines whose step is several calls.

        is_backward: whether it is a backward pass.
        """
        engine = self._engine
        if not is_backward and engine.micro_steps % engine.accumulation == 0:
            self._begin_step()
        if self._timer is None:
            return nullcontext()
        share = self._samples() / engine.deepspeed.train_micro_batch_size_per_gpu()
        return self._with_experts(self._timer.passing(is_backward, share))

    def _with_experts(self, timing: AbstractContextManager[None]) -> AbstractContextManager[None]:
        return timing if self._meter is None else around((timing, self._meter.timing()))

    def _samples(self) -> int:
        """Return the number of samples in the micro-batch that this rank is training."""
        engine = self._engine
        dealt = engine.batch_for(engine.layout).deal(engine.open_batch.samples or engine.host.global_batch_size)
        return dealt.rank(engine.place("data"))[engine.micro_steps % engine.accumulation].samples

    def timed_update(self) -> AbstractContextManager[None]:
        """Return a context manager that times the optimizer's step if a timing window is open, and does nothing
        otherwise.
        """
        return nullcontext() if self._timer is None else self._timer.updating()

    def _begin_step(self) -> None:
        engine = self._engine
        now, step = (engine.segment, len(engine.registered)), engine.global_steps
        if now != self._at:
            self._are_new |= now[1] != self._at[1]
            self._at, self._timer, self._meter = now, None, None
            self._settled = self._next = step + SETTLING
            self._steps.forget()
        if self._settings.experts and self._meter is None and step >= self._settled:
            self._meter = ExpertMeter(engine.host.module)
        is_cheap = self._model.is_cheap and self._meter is None
        if self._timer is None and step >= (self._settled if is_cheap else self._due):
            self._timer, self._opened = self._model.timer(), max(step, self._due)
            self._left = self._opened - step + self._settings.window_steps
        self._began = time.monotonic()

    def finish_step(self) -> None:
        """End the timing window if this step was its last one. Called after each step.

        Raises MemberMissing, naming the members, if others do not reach the end of the window.
        """
        engine = self._engine
        if self._asked is not None and (event := self._asked[1].event) is not None:
            self._asked = None  # the move has failed: a committed switch has gone through `_note_switch`
            self._put_off(event.reason)
        seconds = time.monotonic() - self._began
        self.saved_member_seconds += seconds * self._course.freed
        if engine.global_steps > self._settled:
            self._steps.add(seconds)
        if self._timer is None:
            return
        self._left -= 1
        if self._left > 0:
            return
        timer, self._timer = self._timer, None
        meter, self._meter = self._meter, None
        try:
            course = self._share(timer.times(), _experts_of(meter))
        except WorldChanged as error:  # training will raise it as well
            logger.debug("balance: the window of step %d is lost: %s", engine.global_steps, error)
            return
        self._follow(course)
        self._next = self._opened + self._interval()

    def _interval(self) -> int:
        """Return the number of steps from the start of a timing window to the start of the next one.

        It is the same on all members, because they share one record of moves. The next window comes soon if the effect
        of a move has not been measured yet, or if the last window needs confirmation. With `slow_ratio`, windows are
        frequent enough to notice a slow member in time.
        """
        settings = self._settings
        limits = [settings.every_steps]
        if settings.acts and settings.slow_ratio is not None:
            limits.append(settings.slow_seen_steps)
        course, averaged = self._course, self._averaged
        is_open = self._asked is not None or course.history.open is not None or course.needs_steps
        if is_open or (averaged is not None and averaged.doubted is not None):
            limits.append(ENOUGH_STEPS)
        return max(settings.window_steps, min(limits))

    def _share(self, times: StageTimes, experts: Mapping[str, ExpertTimes]) -> Course:
        """Collect the timings of all members, and return the record of moves with the first member's decision."""
        engine, steps = self._engine, self._engine.global_steps
        newest = self._steps.measured(self._steps_if_changed(steps))
        beside = tuple(getattr(times, name) for name in BESIDE)
        rows = self._model.rows(times)
        if not is_accelerated():  # where a layer's seconds include those for which it waits for other ranks' experts
            for name, each in experts.items():
                rows[self._model.number(name) - self._model.cut[engine.place("pipe")], PASSES] -= each.passes
        mine = _Timed(rows, beside, waiting(times.waits), times.busy_seconds, self._steps.measured(), newest)
        key = f"profile/{engine.segment}/{steps}"
        session = Session(engine.control, key, engine.members, "balance: the end of a window")
        told = to_record(_Told({str(engine.rank): mine}, experts))
        said = session.reduce("rows", told, _together, partial(self._merge_and_decide, steps))
        found = from_record(_Found, said)
        session.forget("rows")
        if self._shared is not None and self._shared.board is session.board:
            self._shared.forget_answer("rows")
        self._shared = session
        if found.has_changed:
            self._steps.forget(but=self._steps_if_changed(steps))
        self._averaged, self._pause = found.averaged, found.pause
        self._are_new, self._step_seconds = False, found.step_seconds
        self.saved_member_seconds, self.busy = found.saved_member_seconds, found.busy
        self.profile = self._profile(self._averaged)
        return found.course

    def _steps_if_changed(self, step: int) -> int:
        """Return how many of the newest steps ran at new costs, if this window confirms a change of costs.

        These are the steps since the beginning of the window that first showed the change. That window's step may be
        later than this one, because loading a checkpoint may return to an earlier step.
        """
        doubted = None if self._averaged is None else self._averaged.doubted
        return self._settings.window_steps + (0 if doubted is None else max(0, step - doubted.step))

    def _profile(self, averaged: Averaged) -> Profile:
        engine = self._engine
        source = f"measured at step {engine.global_steps} on {engine.layout}, windows: {averaged.windows}"
        experts = {name: (self._model.number(name), rows) for name, rows in self._expert_rows().items()}
        return averaged.profile(self._model.layers(), source, experts)

    def _expert_rows(self) -> Mapping[str, ExpertRows]:
        """Return, for each layer whose experts are timed, the experts at each index of the expert axis."""
        engine = self._engine
        return engine.host.shaper.autoep.rows(engine.layout) if self._settings.experts else {}

    def _merge_and_decide(self, step: int, said: dict[str, Any]) -> Any:
        """Merge the timings of all ranks into the mean over windows, and decide. Called only on the first member.

        said: the message of each rank, keyed by rank.
        """
        engine, settings = self._engine, self._settings
        told = from_record(_Told, said)
        timed = {int(rank): each for rank, each in told.timed.items()}
        rows, waits = ({rank: getattr(each, name) for rank, each in timed.items()} for name in ("rows", "waits"))
        beside = [each.beside for each in timed.values()]
        window = TimingWindow.of(rows, engine.layout, self._model.cut, beside, waits)
        ranks = engine.layout.ranks_per_stage
        experts = {name: replace(each, passes=each.passes / ranks) for name, each in told.experts.items()}
        for name, dealt in self._expert_rows().items() if is_accelerated() else ():
            most = busiest(experts[name].tokens.tolist(), dealt)
            window.rows[self._model.number(name), PASSES] -= most * experts[name].passes
        window = replace(window, experts=experts)
        batch = engine.host.global_batch_size, int(engine.deepspeed.train_micro_batch_size_per_gpu())
        averaged = Averaged.after(self._averaged, window, batch, step, settings.least_gain, self._are_new)
        self._pause = Pause(ASSUMED_PAUSE_SECONDS, 1 / engine.bytes_per_second).fitted(self._switches)
        has_changed = self._averaged is not None and averaged.since != self._averaged.since
        steps = (each.newest if has_changed else each.steps for each in timed.values())
        measured = max(steps, key=lambda each: each.seconds)
        slow = self._course.slow
        if measured.count >= ENOUGH_STEPS:  # the first window after a move has seen too little of the members
            slow = slow.after(engine.members, window.speeds, step, settings.slow_ratio)
        course = self._course.at(step, averaged.since, slow)
        if settings.acts and averaged.doubted is not None:
            course = course.without_decision(
                "this window differs from those before it: the next one is to say whether costs have changed"
            )
        elif settings.acts:
            profile = self._profile(averaged)
            decide = partial(self._advise, profile, measured.seconds)
            course = course.after(settings, step, measured, self._model.present, profile, decide)
        busy = Busy(tuple(timed[rank].busy for rank in range(len(timed))), averaged.since)
        return to_record(
            _Found(averaged, self._pause, course, measured.seconds, has_changed, busy, self.saved_member_seconds)
        )


@dataclass(frozen=True, eq=False)
class _Timed:
    """The message of one rank at the end of a window.

    rows: the timings of the rank's layers.
    beside: the times outside the layers that `profile.BESIDE` names.
    waits: the mean seconds that a micro-batch waits for a core, and their standard error; see `waiting`.
    busy: the seconds for which the rank computed; see `StageTimes.busy_seconds`.
    steps: step time in seconds, over all steps that the rank remembers.
    newest: step time in seconds, over the steps with the new costs if costs have changed.
    """

    rows: Rows
    beside: tuple[float, ...]
    waits: tuple[float, float]
    busy: float
    steps: Measured
    newest: Measured


def _experts_of(meter: ExpertMeter | None) -> dict[str, ExpertTimes]:
    return {} if meter is None else {name: ExpertTimes(*each) for name, each in meter.times().items()}


@dataclass(frozen=True, eq=False)
class _Told:
    """The combined messages of some ranks at the end of a window.

    timed: the message of each rank.
    experts: the measurements of each layer's experts, summed over these ranks.
    """

    timed: Mapping[str, _Timed]
    experts: Mapping[str, ExpertTimes]


def _together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Combine the messages of two sets of ranks (records of `_Told`) into one record."""
    first, second = from_record(_Told, one), from_record(_Told, other)
    both = {name: each.plus(second.experts[name]) for name, each in first.experts.items() if name in second.experts}
    experts = {**first.experts, **second.experts, **both}
    whole: dict[str, Any] = to_record(_Told({**first.timed, **second.timed}, experts))
    return whole


@dataclass(frozen=True, eq=False)
class _Found:
    """The first member's answer at the end of a window, sent to all members.

    averaged: the mean over windows.
    pause: the model of a switch's pause.
    course: the record of moves, including this decision.
    step_seconds: step time of the slowest member, in seconds.
    has_changed: whether costs have changed since the previous window.
    busy: how long the ranks computed in the window.
    saved_member_seconds: the total time for which members were free; see `Balancer`.
    """

    averaged: Averaged
    pause: Pause
    course: Course
    step_seconds: float
    has_changed: bool
    busy: Busy
    saved_member_seconds: float = 0.0
