"""What all members remember of moves, and what a window adds to that: the last move is judged, the next one decided.

A pure function of numbers: the first member of a world asks it, and its answer is everybody's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ds_dynatrain.balance.advice import Advice
from ds_dynatrain.balance.decision import Drift, History, Slow, Verdict, drift_of, judge
from ds_dynatrain.balance.decision import Move as Made
from ds_dynatrain.balance.profile import Bools, Ints, Profile
from ds_dynatrain.balance.window import LAST_STEPS, Measured
from ds_dynatrain.config import BalanceConfig
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout

ENOUGH_STEPS = 4
"""That must have been seen before a move, and after it, for it to be judged."""
EXPLAINS = 0.5
"""Layers that take so much less, as a share of what a step takes less since a move, may be why."""


def can_judge(move: Made, measured: Measured) -> bool:
    """Whether enough steps were seen after a move. Where they look slower, which may be noise, more are waited for, up
    to all that are remembered.
    """
    looks_slower = move.before_seconds < measured.seconds <= move.slower_from(measured.error)
    return measured.count >= (LAST_STEPS if looks_slower else ENOUGH_STEPS)


@dataclass(frozen=True)
class Costs:
    """Seconds of both passes of each layer for a sample, and their standard errors.

    For a sample, as another layout may cut the batch into micro-batches of another size.
    """

    seconds: tuple[float, ...]
    errors: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> Costs:
        """As measured."""
        passes = profile.seconds("forward_seconds") + profile.seconds("backward_seconds")
        errors = np.hypot(profile.seconds("forward_error"), profile.seconds("backward_error"))
        return cls(*(tuple((each / profile.micro_batch_size).tolist()) for each in (passes, errors)))

    def drift(self, now: Costs, places: Bools, least: float) -> Drift:
        """Whether those at some places are others now, by `least` of the whole at least, and which way."""
        before, after = (np.array(each.seconds)[places] for each in (self, now))
        error = np.hypot(np.array(self.errors)[places], np.array(now.errors)[places])
        return drift_of(before, after, error, least) if len(before) else Drift.SAME


@dataclass(frozen=True)
class Wanted:
    """A move that is to be made now. before, costs: as they are before it. without: ranks that are let go. back:
    whether it takes the last move back.
    """

    layout: Layout
    predicted_gain: float
    why: str
    before: Measured
    costs: Costs
    without: tuple[int, ...] = ()
    back: bool = False


@dataclass(frozen=True)
class Course:
    """See the module.

    left, costs: the layout before the move that is open, and what layers took there. verdict, gain: of the move that
    the last window has judged; gain is what a step takes less since, as a share; None where nobody can say. wanted: the
    next move. needs_steps: whether one would be made, had enough steps been seen before it. why: what was decided, in
    words.
    """

    history: History
    slow: Slow = field(default_factory=Slow)
    left: Layout | None = None
    costs: Costs | None = None
    verdict: Verdict | None = None
    gain: float | None = None
    wanted: Wanted | None = None
    needs_steps: bool = False
    why: str = ""

    @classmethod
    def new(cls, rules: BalanceConfig, step: int = 0) -> Course:
        """Before anything was measured."""
        return cls(History.new(rules, step))

    def at(self, since: tuple[int, ...], slow: Slow | None = None) -> Course:
        """With what is known of costs by now. since: see `History`."""
        return replace(self, history=replace(self.history, since=since), slow=self.slow if slow is None else slow)

    def in_doubt(self) -> Course:
        """With one more window that differs from those before it: nothing is judged or decided until the next one."""
        return self._unjudged(
            "this window differs from those before it: the next one is to say whether costs have changed"
        )

    def _unjudged(self, why: str) -> Course:
        return replace(self, verdict=None, gain=None, wanted=None, needs_steps=False, why=why)

    def after(
        self,
        rules: BalanceConfig,
        step: int,
        measured: Measured,
        present: Layout,
        profile: Profile,
        advise: Callable[[History], Advice],
    ) -> Course:
        """With one more window. measured: a step by the clock. present: with its boundaries. advise: what would be
        faster; LayoutError if nothing fits.
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
        if not advice.decision.acts:
            return replace(course, why=advice.decision.why)
        if measured.count < ENOUGH_STEPS:
            why = f"steps were measured: {measured.count}, before a move {ENOUGH_STEPS} are"
            return replace(course, needs_steps=True, why=why)
        saved = advice.present_time.seconds - advice.proposed_time.seconds
        gain = saved / max(advice.present_time.seconds, measured.seconds)
        wanted = Wanted(advice.proposed, gain, advice.decision.why, measured, Costs.of(profile), advice.without)
        return replace(course, wanted=wanted, why=advice.decision.why)

    def _drift(self, least: float, present: Layout, now: Costs) -> Drift:
        """Of layers that have stayed where they were, since the move, by that share at least. What has become slower by
        being moved speaks against the move.
        """
        if self.left is None or self.costs is None or len(self.costs.seconds) != len(now.seconds):
            return Drift.MIXED
        stages = [_stages(layout, len(now.seconds)) for layout in (self.left, present)]
        return self.costs.drift(now, stages[0] == stages[1], least)

    def _judged(
        self, rules: BalanceConfig, move: Made, step: int, measured: Measured, costs: Costs, drift: Drift
    ) -> Course:
        verdict, history = judge(rules, self.history, step, measured.seconds, measured.error, drift)
        gain = None if verdict is Verdict.UNKNOWN else 1 - measured.seconds / move.before_seconds
        course = replace(self, history=history, left=None, costs=None, verdict=verdict, gain=gain)
        if verdict is not Verdict.BACK or self.left is None:
            return course
        worse = 1 - move.before_seconds / measured.seconds
        back = Wanted(self.left, worse, verdict.value, measured, costs, back=True)
        return replace(course, wanted=back, why=verdict.value)

    def moved(self, wanted: Wanted, step: int, left: Layout) -> Course:
        """What was wanted has been done. A move back is judged by no window."""
        if wanted.back:
            return replace(self, wanted=None)
        move = Made(step, wanted.predicted_gain, wanted.before.seconds, wanted.before.error)
        return replace(self, history=self.history.moved(move), left=left, costs=wanted.costs, wanted=None)

    def overtaken(self) -> Course:
        """Another switch was made, by the script or as members changed: no window can judge the last move any more."""
        return replace(self, history=replace(self.history, open=None), left=None, costs=None, wanted=None)

    def failed(self, step: int) -> Course:
        """What was wanted did not come about: the next try waits as long as after a move."""
        history = replace(self.history, cool_from=max(self.history.cool_from, step + self.history.waits))
        return replace(self, history=history, wanted=None)


def _stages(layout: Layout, layers: int) -> Ints:
    """[layers], the stage of each."""
    cut = layout.boundaries or (0, layers)
    return np.searchsorted(np.array(cut[1:]), np.arange(layers), side="right")
