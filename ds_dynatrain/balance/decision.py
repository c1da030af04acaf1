"""Decisions on moves to faster layouts: rules for predicted gains, and the judgement of a move by later measurements.

A move is made if its gain is large enough and is not noise, and if the time that the current layout has lost so far has
reached the cost of the move there and back. This is a ski-rental rule, which needs no forecast. A move that made steps
slower is reverted, and later predictions count for half as much. The functions here are pure arithmetic: they do not
measure, move or wait.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.profile import Floats
from ds_dynatrain.space.layout import Layout

ERRORS = 3.0
"""Number of standard errors that a difference must exceed to count.

Two would be enough for a single test, but every window is a test at every stage. Of 225 simulated runs of 2,000 steps
with 10 % of noise, and with moves that cost nothing, one run made a move with two standard errors, and none with three.
"""
CERTAIN = 4.0
"""Number of standard errors by which the time of a layer or the speed of a member must differ to count as changed.

It is higher than `ERRORS`, because each layer and member is tested in every window.
"""
REMEMBERED = 9
"""Maximum number of rival layouts (those that would have been faster) that a `DecisionHistory` keeps."""
LEAST_FACTOR = 0.1
"""Lower limit of `DecisionHistory.factor` after a move that was kept, so that a large predicted gain can still count.
"""


class Answer(Enum):
    """The possible answers to whether a move is made. The answer is the first one, in this order, that applies."""

    OPEN = "the last move is not judged yet"
    SMALL = "too little to gain"
    NOISE = "the gain may be noise"
    DEAR = "too little time is lost so far"
    ACT = "the move pays"


class MoveVerdict(Enum):
    """The judgement of a move by the measurements in the first window after it."""

    KEPT = "it gained at least half of what was predicted"
    LESS = "it gained less than half of that: predictions count for as much less"
    BACK = "it made steps slower: move back, and predictions count for half as much"
    UNKNOWN = "costs have changed since: nobody can say"


class Drift(Enum):
    """The change of the layers' times since a move, over the layers that stayed on their stage."""

    SAME = "as long as before"
    LONGER = "longer"
    SHORTER = "less long"
    MIXED = "longer, and others less long"


SPEAKING = {
    MoveVerdict.KEPT: (Drift.SAME, Drift.LONGER),
    MoveVerdict.LESS: (Drift.SAME,),
    MoveVerdict.BACK: (Drift.SAME, Drift.SHORTER),
}
"""For each judgement of a move, the changes of layer times that do not cast doubt on it.

Slower layers may explain why steps did not become faster, but not why they did. Layers often take longer once stages
that used to wait compute at the same time, because these stages share caches and memory.
"""


@dataclass(frozen=True)
class PastMove:
    """A move that was made.

    predicted_gain: the fraction of a step that the move was predicted to save.
    before_seconds: the measured step time before the move.
    before_error: the standard error of `before_seconds`.
    at_work: the fraction of the members that still work after the move; `predicted_gain` is in terms of the time of all
        members.
    at_most_slower: the fraction by which steps were allowed to become slower.
    """

    predicted_gain: float
    before_seconds: float
    before_error: float
    at_work: float = 1.0
    at_most_slower: float = 0.0

    def slower_from(self, error: float) -> float:
        """Return the step time, in seconds, above which steps are slower than before the move by more than noise.

        error: the standard error of the step time after the move.
        """
        return self.before_seconds * (1 + self.at_most_slower) + ERRORS * math.hypot(error, self.before_error)


@dataclass(frozen=True)
class BalanceDecision:
    """The answer to whether a move is made.

    why: the numbers behind the answer, as text.
    """

    answer: Answer
    why: str

    @property
    def acts(self) -> bool:
        """Whether the decision is to switch to another layout, rather than to stay."""
        return self.answer is Answer.ACT


@dataclass(frozen=True)
class BetterLayout:
    """A layout that was at some time predicted to be better than the one in use (a rival).

    without: the ranks that this layout leaves out.
    lost_seconds: the time lost so far by not using this layout. It falls, at most to 0, while the layout in use is the
        better one.
    """

    layout: Layout
    without: tuple[int, ...] = ()
    lost_seconds: float = 0.0

    def after(self, steps: int, saved_seconds: float) -> BetterLayout:
        """Return this layout with the time lost updated after more steps.

        steps: the number of steps.
        saved_seconds: the seconds that the layout would have saved in each step.
        """
        return dataclasses.replace(self, lost_seconds=max(0.0, self.lost_seconds + max(0, steps) * saved_seconds))


@dataclass(frozen=True)
class DecisionHistory:
    """The record on which decisions are based. Its methods return a new record.

    step: the step up to which time lost is counted.
    since: the step of the last change of costs or slow members, or of the last move that was made or failed.
    factor: the factor by which predicted gains are multiplied: measured gain ÷ predicted gain of the last move if that
        was below a half, otherwise 1; halved by each move that was reverted.
    open: the last move, if it has not been judged yet.
    rivals: the layouts that would have been faster, with the time lost against each, including those that moves have
        left.
    """

    step: int = 0
    since: int = 0
    factor: float = 1.0
    open: PastMove | None = None
    rivals: tuple[BetterLayout, ...] = ()

    def rivals_at(
        self, step: int, proposed: BetterLayout, saved: Callable[[BetterLayout], float], drifts: bool = False
    ) -> tuple[BetterLayout, ...]:
        """Return the rivals (layouts that would have been faster) at this step, the proposed one last.

        Time lost against a new rival counts from `since` on.

        step: the current step.
        proposed: the layout that is proposed now.
        drifts: whether the proposed layout is better because of costs that drift all the time; time lost against it
            then counts only from the last window on.
        saved: function that returns by how many seconds the step of a rival would now be shorter.
        """
        known = {(each.layout, each.without): each for each in self.rivals}
        new = proposed if drifts else proposed.after(self.step - self.since, saved(proposed))
        last = known.pop((proposed.layout, proposed.without), new)
        return tuple(each.after(step - self.step, saved(each)) for each in (*known.values(), last))

    def restarted(self, step: int, left: Layout | None = None) -> DecisionHistory:
        """Return the record with all lost times set to 0, after a move was made or has failed at this step.

        left: the layout that the move left; None if it failed.
        """
        layouts = [each.layout for each in self.rivals if not each.without] + ([] if left is None else [left])
        return dataclasses.replace(
            self, step=step, since=step, rivals=tuple(map(BetterLayout, dict.fromkeys(layouts)))[-REMEMBERED:]
        )


def drift_of(before: Floats, after: Floats, error: Floats, least: float) -> Drift:
    """Return in which direction the seconds of layers, or the speeds of members, have changed; SAME if they have not.

    They have changed if the changes that exceed the noise add up to more than the fraction `least` of the whole. The
    result is MIXED if the sum of all changes is below half of the sum of their absolute values.

    error: the standard error of each difference.
    """
    difference = after - before
    certain = difference[np.abs(difference) > CERTAIN * error]
    size = float(np.abs(certain).sum())
    if not size > least * float(before.sum()):
        return Drift.SAME
    total = float(certain.sum())
    if abs(total) < size / 2:
        return Drift.MIXED
    return Drift.LONGER if total > 0 else Drift.SHORTER


def decide(
    rules: BalanceConfig,
    history: DecisionHistory,
    present_seconds: float,
    target_seconds: float,
    error_seconds: float,
    cost_seconds: float,
    lost_seconds: float,
) -> BalanceDecision:
    """Decide whether to make a move.

    present_seconds: seconds of a step before the move.
    target_seconds: predicted seconds of a step after the move.
    error_seconds: the standard error of the difference between the two.
    cost_seconds: the cost of the move.
    lost_seconds: the time that the present layout has lost so far; see `BetterLayout`.
    """
    saved, lost = (present_seconds - target_seconds) * history.factor, lost_seconds * history.factor
    gain, asked = saved / present_seconds if present_seconds else 0.0, rules.safety * cost_seconds
    table = (
        (Answer.OPEN, history.open is not None, "its window has not been measured"),
        (Answer.SMALL, not gain > 0 or gain < rules.least_gain, f"{gain:.3f} of a step, least_gain {rules.least_gain}"),
        (
            Answer.NOISE,
            saved <= ERRORS * error_seconds,
            f"{saved:.4g} s a step, {ERRORS:g} standard errors are {ERRORS * error_seconds:.4g} s",
        ),
        (
            Answer.DEAR,
            lost < asked,
            f"{lost:.4g} s, safety {rules.safety:g} × cost {cost_seconds:.4g} s = {asked:.4g} s",
        ),
    )
    for answer, holds, numbers in table:
        if holds:
            return BalanceDecision(answer, f"{answer.value}: {numbers}")
    return BalanceDecision(Answer.ACT, f"{Answer.ACT.value}: {gain:.3f} of a step, {lost:.4g} s lost so far")


def judge(
    history: DecisionHistory, move: PastMove, seconds: float, error: float, drift: Drift = Drift.SAME
) -> tuple[MoveVerdict, DecisionHistory]:
    """Judge a move by the first window after it. Returns (verdict, new history).

    history: the record of decisions before the verdict.
    move: the move to judge.
    seconds: the step time measured in that window.
    error: the standard error of `seconds`.
    drift: the change of the layers and members that the move did not touch. If it may explain why step times changed,
        the verdict is UNKNOWN; see `SPEAKING`.

    If the verdict is BACK, the caller reverts the move. The reverting move is not judged.
    """
    closed = dataclasses.replace(history, open=None)
    share = (1 - move.at_work * seconds / move.before_seconds) / move.predicted_gain
    verdict = MoveVerdict.KEPT if share >= 0.5 else MoveVerdict.LESS
    if seconds > move.slower_from(error):
        verdict = MoveVerdict.BACK
    if drift not in SPEAKING[verdict]:
        return MoveVerdict.UNKNOWN, closed
    factors = {MoveVerdict.KEPT: 1.0, MoveVerdict.LESS: max(share, LEAST_FACTOR), MoveVerdict.BACK: history.factor / 2}
    return verdict, dataclasses.replace(closed, factor=factors[verdict])


RECENT = 16
"""Number of newest switches that count. During older ones, other programs may have been running on the machine."""


@dataclass(frozen=True)
class Pause:
    """A model of a switch's pause: seconds = fixed_seconds + seconds_per_byte x bytes moved."""

    fixed_seconds: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a switch that moves this many bytes."""
        return self.fixed_seconds + self.seconds_per_byte * nbytes

    def fitted(self, made: Sequence[tuple[int, float]]) -> Pause:
        """Return this model, corrected by the switches made so far.

        made: (bytes moved, seconds) for each switch, the newest last.

        The fit is by least squares, with neither part below 0. If all switches moved the same number of bytes, the two
        parts cannot be distinguished, and only the fixed part is corrected.
        """
        if not made:
            return self
        sizes, took = (np.array(each, dtype=np.float64) for each in zip(*made[-RECENT:], strict=True))
        if np.ptp(sizes) == 0:
            return Pause(max(0.0, float((took - self.seconds_per_byte * sizes).mean())), self.seconds_per_byte)
        away = sizes - sizes.mean()
        slope = float((away * took).sum() / (away**2).sum())
        fixed = float(took.mean() - slope * sizes.mean())
        if slope < 0:
            return Pause(float(took.mean()), 0.0)
        if fixed < 0:
            return Pause(0.0, float((sizes * took).sum() / (sizes**2).sum()))
        return Pause(fixed, slope)


@dataclass(frozen=True)
class Slow:
    """The members that the last window found slow.

    since: a map from each slow member to the step of the first window in the unbroken run of windows that found it
        slow.
    """

    since: Mapping[int, int] = field(default_factory=dict)

    def after(self, members: Sequence[int], speeds: Sequence[float], step: int, ratio: float | None) -> Slow:
        """Return the slow members after one more window.

        ratio: a member is slow if it takes more than `ratio` times as long as the median member of its stage; None if
            no member counts as slow.
        """
        slow = [member for member, speed in zip(members, speeds, strict=True) if ratio and speed * ratio < 1]
        # loading a checkpoint may go back to an earlier step
        return Slow({member: min(self.since.get(member, step), step) for member in slow})

    def counted(self, step: int, steps: int) -> frozenset[int]:
        """Return the members that have been slow for at least this many steps."""
        return frozenset(member for member, since in self.since.items() if step - since >= steps)


@dataclass(frozen=True)
class Slowdown:
    """The training time lost to slow members so far, as predicted.

    home: the layout that was chosen while no member was slow.
    alone_seconds: the time that would have been lost if the job had stayed in `home`.
    lost_seconds: the time lost in the layouts used since, and in the pauses of the moves between them.
    """

    home: Layout
    alone_seconds: float = 0.0
    lost_seconds: float = 0.0

    @property
    def removed(self) -> float:
        """The fraction of `alone_seconds` that the moves have saved so far."""
        return 1 - self.lost_seconds / self.alone_seconds if self.alone_seconds else 0.0

    def __str__(self) -> str:
        lost = f"{self.lost_seconds:.4g} of {self.alone_seconds:.4g} s were lost"
        return f"slow members: {lost}, {self.removed:.2f} of the slow-down is removed"
