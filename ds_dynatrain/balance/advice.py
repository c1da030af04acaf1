"""Advice from measurements: the best layout for the current members, and whether moving to it pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ds_dynatrain.balance.choose import FittingLayout, Members, Search, choose
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.decision import (
    REMEMBERED,
    Answer,
    BalanceDecision,
    BetterLayout,
    DecisionHistory,
    Slowdown,
    decide,
)
from ds_dynatrain.balance.experts import ExpertBalance, balances, better_map
from ds_dynatrain.balance.partition import PLENTY
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import StepTime, step_time
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout

SLACK = 0.02
"""Fraction by which the slowest stage may take longer than in the optimal division, if fewer bytes move that way."""
ROUTES_DRIFT = 2.0
"""Factor by which the cost of a move to another map of experts (which rank holds which) is multiplied.

Token routes keep drifting, so a map stays useful for a shorter time than boundaries do. In simulated jobs, 80 % of the
moves paid off without the factor (`tools/bench_experts.py`).
"""
AS_GOOD = 0.9
"""Fraction of the newest map's saving at which a map of experts that was proposed earlier is proposed again.

Tokens are counted anew in each window of timed steps. Without this rule each window would propose another map, and the
time lost against the earlier one would be forgotten.
"""
Shape = Literal["boundaries", "any"]
"""The changes that the search may propose.

"boundaries" keeps the numbers of stages and data ranks; "any" may change both, and also the shares of samples.
"""
MoveTo = Callable[[Layout, tuple[int, ...]], "MoveCost | None"]
"""Function (layout, ranks that leave) -> the cost of moving to the layout; None if a switch would be refused."""


@dataclass(frozen=True)
class MoveCost:
    """The cost of moving to a layout: the bytes transferred, and the seconds for which training pauses."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Advice:
    """A proposed layout, and whether moving to it pays.

    present: the current layout.
    proposed: the proposed layout; the current one if nothing better is known.
    present_time: the predicted step time of the current layout.
    proposed_time: the predicted step time of the proposed layout.
    move: the cost of moving to the proposed layout.
    decision: whether to move, and the numbers behind the answer.
    without: the slow ranks that would leave the layout.
    rivals: the layouts that would have been faster than the one in use; see `DecisionHistory`.
    slowdown: the time lost to slow members; None if none has been slow.
    at_work: the fraction of the working members that would still work after the move. It is below 1 only for a move
        that saves members. The decision counts the time of all members, so the proposed step time is multiplied by this
        fraction.
    release: whether nodes without work should leave now; None if there are none, or if none may leave.
    saved_member_seconds: the total time for which members were free because fewer were enough.
    experts: the distribution of tokens in each layer whose experts were measured.

    `str` returns a readable report.
    """

    present: Layout
    proposed: Layout
    present_time: StepTime
    proposed_time: StepTime
    move: MoveCost
    decision: BalanceDecision
    without: tuple[int, ...] = ()
    rivals: tuple[BetterLayout, ...] = ()
    slowdown: Slowdown | None = None
    at_work: float = 1.0
    release: BalanceDecision | None = None
    saved_member_seconds: float = 0.0
    experts: tuple[ExpertBalance, ...] = ()

    @property
    def gain(self) -> float:
        """Predicted saving, as a fraction of the current step."""
        present = self.present_time.seconds
        return 1 - self.proposed_time.seconds / present if present else 0.0

    def __str__(self) -> str:
        rows = [self._row("present", self.present, self.present_time)]
        if self.slowdown is not None:
            rows.append(str(self.slowdown))
        if self.proposed == self.present and not self.without:
            rows.append("no layout is predicted to be faster")
        else:
            rows.append(self._row("proposed", self.proposed, self.proposed_time))
            if self.without:
                rows.append(f"it lets go of rank {', '.join(map(str, self.without))}, which is slow")
            if (idle := self.present.world_size - self.proposed.world_size) > 0:
                rows.append(
                    f"{self.proposed.world_size} of {self.present.world_size} members are enough, {idle} may go"
                )
            move = f"{self.move.nbytes} bytes would move, about {self.move.seconds:.3g} s"
            rows.append(f"{move}; {self.decision.why}")
        if self.release is not None:
            rows.append(f"nodes without work {'leave' if self.release.acts else 'stay'}: {self.release.why}")
        rows += map(str, self.experts)
        if self.saved_member_seconds:
            rows.append(f"{self.saved_member_seconds:.4g} member-seconds were saved")
        return "\n".join(rows)

    def _row(self, name: str, layout: Layout, time: StepTime) -> str:
        """Return one line of the report about a layout, which is described by its boundaries if only these differ."""
        is_same_otherwise = self.present.replace(boundaries=None) == self.proposed.replace(boundaries=None)
        cut = f"boundaries {','.join(map(str, layout.boundaries or ()))}"
        what = cut if self.present.pipe > 1 and is_same_otherwise else str(layout)
        busy = ", ".join(f"{1e3 * seconds:.4g}" for seconds in time.busy)
        return f"{name} {what}: a step takes {1e3 * time.seconds:.4g} ms, its stages compute {busy} ms"


@dataclass(frozen=True)
class Situation:
    """The current state of training, for which `advise` answers.

    present: the current layout, with its boundaries.
    accumulation: function from a layout to the number of micro-batches into which it divides a global batch.
    step: the current step.
    history: the earlier decisions.
    rules: the `balance` block of the configuration.
    memory_bytes: the memory of one member, in bytes.
    shape: the changes that may be proposed.
    slow: the ranks that count as slow. Only their speeds are used; all other ranks count as equally fast.
    spares: the number of idle members, which could replace slow ones, or work again.
    vacant: how many of the idle members are on nodes that could leave.
    pause_seconds: seconds for which a change of members pauses training.
    step_seconds: the measured step time in seconds; 0 if none was measured.
    pipeline: whether the model is a PipelineModule.
    slowdown: the time lost to slow members up to `history.step`; None if none has been slow.
    """

    present: Layout
    accumulation: Callable[[Layout], int]
    step: int
    history: DecisionHistory
    rules: BalanceConfig
    memory_bytes: int = PLENTY
    shape: Shape = "boundaries"
    slow: frozenset[int] = frozenset()
    spares: int = 0
    vacant: int = 0
    pause_seconds: float = 0.0
    step_seconds: float = 0.0
    pipeline: bool = True
    slowdown: Slowdown | None = None

    def time(self, profile: Profile, layout: Layout, speeds: Sequence[float]) -> StepTime:
        """Return the predicted step time of a layout.

        speeds: the speed of the member at each rank.
        """
        return step_time(profile, layout, self.deal(profile, layout), speeds[: layout.world_size])

    def deal(self, profile: Profile, layout: Layout) -> Deal:
        """Return how a layout divides the samples of a global batch over data ranks and micro-batches."""
        return Deal.of(profile, layout, self.accumulation(layout), self.pipeline)

    def at_work(self, layout: Layout) -> float:
        """Return the fraction (at most 1) of the working members that would still work in a layout.

        Returns 1 if the configuration keeps all members working.
        """
        return min(1.0, layout.world_size / self.present.world_size) if self.rules.members != "keep" else 1.0


def advise(profile: Profile, at: Situation, move_to: MoveTo) -> Advice:
    """Return the best layout of the allowed shapes, and whether to move to it.

    If a member is slow, the best of three answers is proposed: other boundaries, other shares, or a layout without that
    member.

    move_to: function that returns the cost of a move.

    Raises LayoutError if nothing fits into the memory.
    """
    speeds = (speed if rank in at.slow else 1.0 for rank, speed in enumerate(profile.speeds))
    profile = replace(profile, speeds=tuple(speeds))
    now = at.time(profile, at.present, profile.speeds)
    best, without, gone = _best(profile, at, move_to), tuple[int, ...](), tuple(sorted(at.slow))
    if gone:
        with suppress(LayoutError):
            fewer = _best(profile, at, move_to, gone)
            if fewer.seconds < best.seconds:
                best, without = fewer, gone

    def time(layout: Layout, without: tuple[int, ...]) -> StepTime:
        stay = (speed for rank, speed in enumerate(profile.speeds) if rank not in without)
        return at.time(profile, layout, (*stay, *(1.0,) * at.spares))

    def saved(rival: BetterLayout) -> float:
        return now.seconds - at.at_work(rival.layout) * time(rival.layout, rival.without).seconds

    def is_open(layout: Layout) -> bool:
        return layout == best.layout or move_to(layout, without) is not None

    proposed = _with_map(profile, at, best.layout, lambda layout: time(layout, without).seconds, is_open)
    then = best.time if proposed == best.layout else time(proposed, without)
    move = move_to(proposed, without) if without or proposed != at.present else None
    moved = move or MoveCost(0, 0.0)
    is_of_routes = proposed.experts != at.present.experts
    rivals = at.history.rivals_at(at.step, BetterLayout(proposed, without), saved, is_of_routes)
    # The saving is a prediction; the current step includes time that is not predicted, if it was measured.
    present = max(now.seconds, at.step_seconds)
    error = _error(profile, at.deal(profile, at.present), at.present, proposed)
    at_work = at.at_work(proposed)
    target = at_work * (present - (now.seconds - then.seconds))
    cost = moved.seconds * (ROUTES_DRIFT if is_of_routes else 1.0)
    decision = decide(at.rules, at.history, present, target, error, cost, rivals[-1].lost_seconds)
    if decision.answer in (Answer.SMALL, Answer.NOISE):
        rivals = rivals[: len(at.history.rivals)]
    slowdown, release = _slowdown(profile, at, now.seconds), _release(at, present)
    return Advice(
        *(at.present, proposed, now, then, moved, decision, without, rivals[-REMEMBERED:], slowdown),
        at_work=at_work,
        release=release,
        experts=balances(profile, at.present, proposed) if at.present.expert == proposed.expert > 1 else (),
    )


def _with_map(
    profile: Profile,
    at: Situation,
    layout: Layout,
    seconds: Callable[[Layout], float],
    is_open: Callable[[Layout], bool],
) -> Layout:
    """Return the layout with the fastest map of experts, or with an earlier proposed map that is almost as fast.

    seconds: function that returns the seconds of a step.
    is_open: function that returns whether a switch to the layout would be accepted.
    """
    if not at.rules.experts or not profile.experts or layout.expert == 1:
        return layout
    best = layout.replace(experts=better_map(profile, layout, at.rules.least_gain))
    now = seconds(layout)
    enough = AS_GOOD * (now - seconds(best))
    earlier = sorted(at.history.rivals, key=lambda each: each.lost_seconds, reverse=True)
    known = [each.layout for each in earlier if each.layout.replace(experts=layout.experts) == layout]
    found = (each for each in (*known, best) if now - seconds(each) >= enough > 0 and is_open(each))
    return next(found, layout)


def _slowdown(profile: Profile, at: Situation, present_seconds: float) -> Slowdown | None:
    """Return the training time lost to slow members so far; None if no member has been slow."""
    before = at.slowdown or (Slowdown(at.present) if at.slow else None)
    if before is None:
        return None
    even, steps = (1.0,) * len(profile.speeds), max(0, at.step - at.history.step)
    alone, whole = (at.time(profile, before.home, speeds).seconds for speeds in (profile.speeds, even))
    alone_seconds = before.alone_seconds + steps * (alone - whole)
    return Slowdown(before.home, alone_seconds, before.lost_seconds + steps * (present_seconds - whole))


def _release(at: Situation, seconds: float) -> BalanceDecision | None:
    """Decide whether nodes without work should leave now. Returns None if there are none, or if none may leave.

    They leave once the time that their members have spent without work reaches the time that all members lose in
    `safety` changes of members. With `safety` = 2, that pays for one change to leave and one to come back.
    """
    if not at.vacant or at.rules.members != "release":
        return None
    stays = at.present.world_size / (at.present.world_size + at.vacant)
    lost = (at.step - at.history.since) * (1 - stays) * seconds
    return decide(at.rules, at.history, seconds, stays * seconds, 0.0, at.pause_seconds, lost)


def _best(profile: Profile, at: Situation, move_to: MoveTo, gone: tuple[int, ...] = ()) -> FittingLayout:
    """Return the layout with the shortest predicted step, without the ranks in `gone`.

    If members may become idle, it is the layout with the fewest members whose step is at most `at_most_slower` slower
    than the best one. Idle members may replace ranks in `gone`. The layout grows only if members may become idle; in
    that case idle members may also work again.

    Raises LayoutError if nothing fits.
    """
    present, rules = at.present, at.rules
    packs = rules.members != "keep" and (bool(gone) or not at.slow)
    speeds = [speed for rank, speed in enumerate(profile.speeds) if rank not in gone]
    spares = (1.0,) * (at.spares if gone or packs else 0)
    members = Members((*speeds, *spares), at.memory_bytes, are_placed=True)

    def refused(layout: Layout) -> bool:
        if layout == present and not gone:
            return False
        is_of_size = packs or layout.world_size == present.world_size
        if gone:
            is_of_size = packs or layout.world_size <= present.world_size
        elif at.shape == "boundaries":
            may_share = at.slow or present.shares  # if no rank is slow any longer, samples go back
            if layout.data != present.data or (layout.shares != present.shares and not may_share):
                return True
        return not is_of_size or move_to(layout, gone) is None

    search = Search(
        pipes=(present.pipe,) if at.shape == "boundaries" and not packs else None,
        zero_stages=(present.zero_stage,),
        accumulation=at.accumulation,
        pipeline=at.pipeline,
        slack=SLACK,
        count=2,
        at_most_slower=rules.at_most_slower if packs else None,
    )
    start = present.replace(shares=None) if gone else present
    return choose(profile, start, members, search, refused)[0]


def _error(profile: Profile, deal: Deal, present: Layout, target: Layout) -> float:
    """Return the standard error of the difference between the predicted step times of two layouts.

    Only layers that are on the slowest stage of exactly one of the two layouts contribute.
    """
    places, seconds, differ = np.arange(len(profile.layers)), profile.passes, np.zeros(len(profile.layers), np.bool_)
    for layout in (present, target):
        cut: Sequence[int] = layout.boundaries or (0, len(profile.layers))
        start, stop = max(itertools.pairwise(cut), key=lambda each: float(seconds[each[0] : each[1]].sum()))
        differ ^= (start <= places) & (places < stop)
    variance = (profile.seconds("forward_error") ** 2 + profile.seconds("backward_error") ** 2) * differ
    return float(max(deal.shares) / profile.micro_batch_size * np.sqrt(variance.sum()))
