"""The record of moves: at the end of each window the last move is judged, and the next one is decided on.

A move is a switch to a layout that is predicted to be faster. A window is a number of timed steps. The decision depends
only on numbers, so the first member of a world makes it, and all members adopt it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ds_dynatrain.balance.advice import Advice
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.decision import (
    DecisionHistory,
    Drift,
    MoveVerdict,
    PastMove,
    Slow,
    Slowdown,
    drift_of,
    judge,
)
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.window import LAST_STEPS, Measured
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout

ENOUGH_STEPS = 4
"""Number of measured steps required before a move, and again after it to judge it."""
EXPLAINS = 0.5
"""Smallest change of the layers' seconds, as a fraction of a step time's change, that may explain this change."""


@dataclass(frozen=True)
class Costs:
    """The seconds that each layer's forward and backward passes take per sample, and their standard errors.

    They are kept per sample, because another layout may use micro-batches of another size.

    slow: the members that are slow.
    """

    seconds: tuple[float, ...]
    errors: tuple[float, ...]
    slow: tuple[int, ...] = ()

    @classmethod
    def of(cls, profile: Profile, slow: Slow) -> Costs:
        """Return the costs that a profile has measured."""
        errors = np.hypot(profile.seconds("forward_error"), profile.seconds("backward_error"))
        seconds, spread = (tuple((each / profile.micro_batch_size).tolist()) for each in (profile.passes, errors))
        return cls(seconds, spread, tuple(slow.since))


@dataclass(frozen=True)
class WantedMove:
    """A move (a switch to a layout that is predicted to be faster) that is to be made now.

    layout: the layout to move to.
    predicted_gain: the fraction of a step that the move is predicted to save.
    why: a description of the reason.
    before: the measured step time before the move.
    costs: the costs of the layers before the move.
    without: the ranks that leave.
    back: whether this move reverts the last one.
    at_work: the fraction of the working members that still work after the move; see `Advice`.
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
    """The record of moves: the decisions made so far, and the next one. Its methods return a new record.

    history: the earlier decisions.
    slow: the members found slow.
    slowdown: the time lost to slow members; None if none has been slow.
    left: the layout before the last move, until that move has been judged.
    costs: the costs of the layers in `left`.
    verdict: the last window's judgement of a move; None if it judged none.
    gain: the fraction by which that move made a step shorter; None if unknown.
    wanted: the next move, or None.
    needs_steps: whether a move would be made if enough steps had been measured before it.
    releases: whether nodes without work leave now.
    freed: the number of members that moves have made idle and that have not worked since.
    let_go: the members that moves have made idle because they were slow. No move gives them work again.
    why: a description of the decision.
    """

    history: DecisionHistory = field(default_factory=DecisionHistory)
    slow: Slow = field(default_factory=Slow)
    slowdown: Slowdown | None = None
    left: Layout | None = None
    costs: Costs | None = None
    verdict: MoveVerdict | None = None
    gain: float | None = None
    wanted: WantedMove | None = None
    needs_steps: bool = False
    releases: bool = False
    freed: int = 0
    let_go: tuple[int, ...] = ()
    why: str = ""

    def at(self, step: int, since: int, slow: Slow) -> Course:
        """Return the record with updated knowledge of changed costs and slow members.

        step: the current step. It may be earlier than that of the last window, if a checkpoint was loaded.
        since: the step at which costs changed.
        slow: the slow members. A member that is no longer slow is taken to have recovered at the last window.
        """
        history = self.history
        known = replace(history, step=min(history.step, step), since=min(history.since, step))
        begun = max(known.since, since, *slow.since.values(), 0 if slow == self.slow else known.step)
        return replace(self, history=replace(known, since=begun, step=max(known.step, begun)), slow=slow)

    def without_decision(self, why: str) -> Course:
        """Return the record with this description, but without a verdict on a move, a wanted move or released nodes."""
        return replace(self, verdict=None, gain=None, wanted=None, needs_steps=False, releases=False, why=why)

    def after(
        self,
        rules: BalanceConfig,
        step: int,
        measured: Measured,
        present: Layout,
        profile: Profile,
        advise: Callable[[Course], Advice],
    ) -> Course:
        """Return the record after one more window: judge the last move, and decide on the next one.

        rules: the `balance` block of the configuration.
        step: the current step.
        measured: the measured step time.
        present: the current layout, with its boundaries.
        profile: the profile measured so far.
        advise: function that returns the fastest layout, or raises LayoutError if nothing fits.
        """
        course, costs = self.without_decision(""), Costs.of(profile, self.slow)
        if (move := self.history.open) is not None:
            looks_slower = move.before_seconds < measured.seconds <= move.slower_from(measured.error)
            if measured.count >= (LAST_STEPS if looks_slower else ENOUGH_STEPS):  # what looks slower may be noise
                least = max(rules.least_gain, EXPLAINS * abs(1 - measured.seconds / move.before_seconds))
                course = course._judged(move, measured, costs, self._drift(least, present, costs))
                if course.wanted is not None:
                    return course
        try:
            advice = advise(course)
        except LayoutError as error:
            return replace(course, why=str(error))
        history = replace(course.history, step=step, rivals=advice.rivals)
        course = replace(course, history=history, slowdown=advice.slowdown)
        release = advice.release
        if not advice.decision.acts and release is not None and release.acts:
            return replace(course.failed(step), releases=True, why=release.why)  # so not in the next window
        if not advice.decision.acts:
            return replace(course, why=advice.decision.why)
        if measured.count < ENOUGH_STEPS:
            why = f"steps were measured: {measured.count}, before a move {ENOUGH_STEPS} are"
            return replace(course, needs_steps=True, why=why)
        saved = advice.present_time.seconds - advice.proposed_time.seconds
        gain = saved / max(advice.present_time.seconds, measured.seconds)
        wanted = WantedMove(
            *(advice.proposed, gain, advice.decision.why, measured, costs, advice.without),
            at_work=advice.at_work,
            at_most_slower=rules.at_most_slower if advice.at_work < 1 else 0.0,
        )
        return replace(course, wanted=wanted, why=advice.decision.why)

    def _drift(self, least: float, present: Layout, now: Costs) -> Drift:
        """Return how the costs of layers that stayed on their stage have changed since the move.

        Layers that moved are left out: if they became slower, the move may be the reason. The result is MIXED if a
        member became slow.

        least: the fraction of the layers' total seconds that a change must exceed.
        present: the current layout.
        now: the current costs.
        """
        layers, then = len(now.seconds), self.costs
        if self.left is None or then is None or len(then.seconds) != layers or set(now.slow) - set(then.slow):
            return Drift.MIXED
        cuts = (layout.boundaries or (0, layers) for layout in (self.left, present))
        stayed = np.equal(*(np.searchsorted(cut[1:], np.arange(layers), side="right") for cut in cuts))
        before, after = (np.array([each.seconds, each.errors])[:, stayed] for each in (then, now))
        return drift_of(before[0], after[0], np.hypot(before[1], after[1]), least)

    def _judged(self, move: PastMove, measured: Measured, costs: Costs, drift: Drift) -> Course:
        verdict, history = judge(self.history, move, measured.seconds, measured.error, drift)
        gain = None if verdict is MoveVerdict.UNKNOWN else 1 - measured.seconds / move.before_seconds
        course = replace(self, history=history, left=None, costs=None, verdict=verdict, gain=gain)
        if verdict is not MoveVerdict.BACK or self.left is None:
            return course
        worse = 1 - move.before_seconds / measured.seconds
        back = WantedMove(self.left, worse, verdict.value, measured, costs, back=True)
        return replace(course, wanted=back, why=verdict.value)

    def moved(self, wanted: WantedMove, step: int, left: Layout, pause_seconds: float) -> Course:
        """Return the record after the wanted move was made. A move that reverts another one will not be judged.

        step: the step of the move.
        left: the layout before the move.
        pause_seconds: the seconds for which training paused.
        """
        gain, before = 1 - wanted.at_work * (1 - wanted.predicted_gain), wanted.before
        move = PastMove(gain, before.seconds, before.error, wanted.at_work, wanted.at_most_slower)
        history = replace(self.history.restarted(step, left), open=None if wanted.back else move)
        slowdown = self.slowdown
        if slowdown is not None:  # a member that was let go is not measured any longer
            home = slowdown.home if self.slow.since else wanted.layout
            lost = slowdown.lost_seconds + pause_seconds
            slowdown = None if wanted.without else replace(slowdown, home=home, lost_seconds=lost)
        freed = self._freed(wanted.layout.world_size, left.world_size)
        course = replace(self, history=history, slowdown=slowdown, wanted=None, freed=freed)
        return course if wanted.back else replace(course, left=left, costs=wanted.costs)

    def _freed(self, after: int, before: int) -> int:
        return max(0, self.freed + before - after)

    def overtaken(self, step: int, after: int = 0, before: int = 0) -> Course:
        """Return the record after a switch that the balancer did not request. The last move is no longer judged.

        Such a switch was requested by the script, or caused by a change of members. Members that it activates are no
        longer free, and members that it removes from the job do not count as freed by the balancer. Time lost is
        counted anew from this step on.

        after: the number of members that work after the switch.
        before: the number of members that worked before it.
        """
        freed = self._freed(max(after, before), before)
        history = replace(self.history, open=None, rivals=(), step=step, since=step)
        return replace(self, history=history, slowdown=None, left=None, costs=None, wanted=None, freed=freed, let_go=())

    def failed(self, step: int) -> Course:
        """Return the record after the wanted move failed. Time lost is counted anew, so the next move has to wait."""
        return replace(self, history=self.history.restarted(step), wanted=None)
