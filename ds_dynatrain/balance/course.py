"""The course of moves: at the end of each window the last move is judged, and the next one is decided on.

A move is a switch to a layout that is predicted to be faster. A window is a number of timed steps. The decision depends
only on numbers: the first member of a world makes it, and all members adopt it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ds_dynatrain.balance.advice import Advice
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.decision import DecisionHistory, Drift, MoveVerdict, PastMove, Slow, drift_of, judge
from ds_dynatrain.balance.profile import Bools, Ints, Profile
from ds_dynatrain.balance.window import LAST_STEPS, Measured
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout

ENOUGH_STEPS = 4
"""Number of measured steps required before a move, and again after it to judge it."""
EXPLAINS = 0.5
"""Smallest change of the layers' seconds that may explain a change of a step's seconds, as a fraction of the latter."""


def can_judge(move: PastMove, measured: Measured) -> bool:
    """Return whether enough steps have been measured after a move to judge the move.

    If steps look slower, which may be noise, more steps are needed, up to the number of steps that are remembered.
    """
    looks_slower = move.before_seconds < measured.seconds <= move.slower_from(measured.error)
    return measured.count >= (LAST_STEPS if looks_slower else ENOUGH_STEPS)


@dataclass(frozen=True)
class Costs:
    """The seconds of both passes of each layer per sample, and their standard errors.

    They are kept per sample, because another layout may use micro-batches of another size.
    """

    seconds: tuple[float, ...]
    errors: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> Costs:
        """Return the costs that a profile has measured."""
        passes = profile.seconds("forward_seconds") + profile.seconds("backward_seconds")
        errors = np.hypot(profile.seconds("forward_error"), profile.seconds("backward_error"))
        return cls(*(tuple((each / profile.micro_batch_size).tolist()) for each in (passes, errors)))

    def drift(self, now: Costs, places: Bools, least: float) -> Drift:
        """Return whether and in which direction the costs of some layers have changed.

        places: [layers], whether to compare each layer.
        least: the fraction of the whole that a change must exceed.
        """
        before, after = (np.array(each.seconds)[places] for each in (self, now))
        error = np.hypot(np.array(self.errors)[places], np.array(now.errors)[places])
        return drift_of(before, after, error, least) if len(before) else Drift.SAME


@dataclass(frozen=True)
class WantedMove:
    """A move to be made now.

    layout: the layout to move to.
    predicted_gain: the fraction of a step that the move is predicted to save.
    why: a description of the reason.
    before: the measured step before the move.
    costs: the costs of the layers before the move.
    without: the ranks that leave.
    back: whether this move takes the last one back.
    at_work: see `Advice`.
    at_most_slower: the fraction by which steps may become slower, because fewer members work.
    """

    layout: Layout
    predicted_gain: float
    why: str
    before: Measured
    costs: Costs
    without: tuple[int, ...] = ()
    back: bool = False
    at_work: float = 1.0
    at_most_slower: float = 0.0


@dataclass(frozen=True)
class Course:
    """The state of the course: the decisions made so far, and the next one. Its methods return a new state.

    history: the memory of decisions.
    slow: the members found slow.
    left: the layout before the move that has not been judged yet.
    costs: the costs of the layers in `left`.
    verdict: the last window's judgement of a move; None if it judged none.
    gain: the fraction by which that move made a step shorter; None if unknown.
    wanted: the next move, or None.
    needs_steps: whether a move would be made if enough steps had been measured before it.
    releases: whether nodes without work leave now.
    freed: the number of members that moves have made idle and that have not worked since.
    why: a description of the decision.
    """

    history: DecisionHistory
    slow: Slow = field(default_factory=Slow)
    left: Layout | None = None
    costs: Costs | None = None
    verdict: MoveVerdict | None = None
    gain: float | None = None
    wanted: WantedMove | None = None
    needs_steps: bool = False
    releases: bool = False
    freed: int = 0
    why: str = ""

    @classmethod
    def new(cls, rules: BalanceConfig, step: int = 0) -> Course:
        """Return the state of the course before any measurement."""
        return cls(DecisionHistory.new(rules, step))

    def at(self, since: tuple[int, ...], slow: Slow | None = None) -> Course:
        """Return the course with the current knowledge of changed costs and slow members.

        since: the steps at which costs changed; see `DecisionHistory`.
        slow: the slow members; None to keep those known.
        """
        return replace(self, history=replace(self.history, since=since), slow=self.slow if slow is None else slow)

    def in_doubt(self) -> Course:
        """Return the course after a window that differs from the earlier ones. The next window decides."""
        return self._unjudged(
            "this window differs from those before it: the next one is to say whether costs have changed"
        )

    def _unjudged(self, why: str) -> Course:
        return replace(self, verdict=None, gain=None, wanted=None, needs_steps=False, releases=False, why=why)

    def after(
        self,
        rules: BalanceConfig,
        step: int,
        measured: Measured,
        present: Layout,
        profile: Profile,
        advise: Callable[[DecisionHistory], Advice],
    ) -> Course:
        """Return the course after one more window.

        measured: the measured seconds of a step.
        present: the current layout, with its boundaries.
        advise: function that returns the fastest layout, or raises LayoutError if nothing fits.
        """
        course = self._unjudged("")
        open_move = self.history.open
        if open_move is not None and can_judge(open_move, measured):
            least = max(rules.least_gain, EXPLAINS * abs(1 - measured.seconds / open_move.before_seconds))
            drift = self._drift(least, present, Costs.of(profile))
            course = course._judged(rules, open_move, step, measured, Costs.of(profile), drift)
            if course.wanted is not None:
                return course
        try:
            advice = advise(course.history)
        except LayoutError as error:
            return replace(course, why=str(error))
        release = advice.release
        if not advice.decision.acts and release is not None and release.acts:
            return replace(course.failed(step), releases=True, why=release.why)  # and so not again in the next window
        if not advice.decision.acts:
            return replace(course, why=advice.decision.why)
        if measured.count < ENOUGH_STEPS:
            why = f"steps were measured: {measured.count}, before a move {ENOUGH_STEPS} are"
            return replace(course, needs_steps=True, why=why)
        saved = advice.present_time.seconds - advice.proposed_time.seconds
        gain = saved / max(advice.present_time.seconds, measured.seconds)
        wanted = WantedMove(
            *(advice.proposed, gain, advice.decision.why, measured, Costs.of(profile), advice.without),
            at_work=advice.at_work,
            at_most_slower=rules.at_most_slower if advice.at_work < 1 else 0.0,
        )
        return replace(course, wanted=wanted, why=advice.decision.why)

    def _drift(self, least: float, present: Layout, now: Costs) -> Drift:
        """Return the drift of the layers that have stayed on their stage since the move.

        Layers that moved are left out: if they became slower, the move may be the reason.

        least: the fraction of the whole that a change must exceed.
        """
        if self.left is None or self.costs is None or len(self.costs.seconds) != len(now.seconds):
            return Drift.MIXED
        stages = [_stages(layout, len(now.seconds)) for layout in (self.left, present)]
        return self.costs.drift(now, stages[0] == stages[1], least)

    def _judged(
        self, rules: BalanceConfig, move: PastMove, step: int, measured: Measured, costs: Costs, drift: Drift
    ) -> Course:
        verdict, history = judge(rules, self.history, step, measured.seconds, measured.error, drift)
        gain = None if verdict is MoveVerdict.UNKNOWN else 1 - measured.seconds / move.before_seconds
        course = replace(self, history=history, left=None, costs=None, verdict=verdict, gain=gain)
        if verdict is not MoveVerdict.BACK or self.left is None:
            return course
        worse = 1 - move.before_seconds / measured.seconds
        back = WantedMove(self.left, worse, verdict.value, measured, costs, back=True)
        return replace(course, wanted=back, why=verdict.value)

    def moved(self, wanted: WantedMove, step: int, left: Layout) -> Course:
        """Return the course after the wanted move was made. A move back is not judged by any window."""
        if wanted.back:
            return replace(self, wanted=None, freed=self._freed(wanted.layout.world_size, left.world_size))
        gain, before = 1 - wanted.at_work * (1 - wanted.predicted_gain), wanted.before
        move = PastMove(step, gain, before.seconds, before.error, wanted.at_work, wanted.at_most_slower)
        freed = self._freed(wanted.layout.world_size, left.world_size)
        return replace(self, history=self.history.moved(move), left=left, costs=wanted.costs, wanted=None, freed=freed)

    def _freed(self, after: int, before: int) -> int:
        return max(0, self.freed + before - after)

    def overtaken(self, after: int = 0, before: int = 0) -> Course:
        """Return the course after a switch that the balancer did not request. The last move is never judged.

        Such a switch was requested by the script, or caused by a change of members. Members that it puts to work are no
        longer free; members that it takes from the job were not freed by balance.

        after: the number of members that work after the switch.
        before: the number of members that worked before it.
        """
        history, freed = replace(self.history, open=None), self._freed(max(after, before), before)
        return replace(self, history=history, left=None, costs=None, wanted=None, freed=freed)

    def failed(self, step: int) -> Course:
        """Return the course after the wanted move failed.

        The next attempt must wait as long as it would after a move.
        """
        history = replace(self.history, cool_from=max(self.history.cool_from, step + self.history.waits))
        return replace(self, history=history, wanted=None)


def _stages(layout: Layout, layers: int) -> Ints:
    """Return [layers]: the stage of each layer."""
    cut = layout.boundaries or (0, layers)
    return np.searchsorted(np.array(cut[1:]), np.arange(layers), side="right")
