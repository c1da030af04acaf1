"""What a window adds to the course of all members: a judgement, a decision; and what it is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.balance.advice import Advice, MoveCost, Situation, advise
from ds_dynatrain.balance.config import BalanceConfig as Rules
from ds_dynatrain.balance.course import Costs, Course, WantedMove
from ds_dynatrain.balance.decision import Answer, DecisionHistory, MoveVerdict, Slow, Slowdown
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.window import Measured, StepSeconds
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space.layout import Layout
from tests.balance.profiles import profile

RULES = Rules()
EVEN = Layout(pipe=2, data=1, zero_stage=1, boundaries=(0, 2, 4))
FRONT = EVEN.replace(boundaries=(0, 1, 4))
HEAVY = profile((3.0, 1.0, 1.0, 1.0), batch=8, speeds=(1.0, 1.0))
STEP = Measured(100.0, 0.5, 8)


def advice(found: Profile, present: Layout, step: int, cost: float = 1.0) -> Callable[[Course], Advice]:
    """From the library, as the engine asks it."""

    def ask(course: Course) -> Advice:
        at = Situation(present, lambda layout: 8, step, course.history, RULES)
        return advise(found, at, lambda layout, without: MoveCost(1, cost))

    return ask


def after(course: Course, step: int, measured: Measured, present: Layout, found: Profile = HEAVY) -> Course:
    return course.after(RULES, step, measured, present, found, advice(found, present, step))


def moved(measured: Measured = STEP) -> Course:
    """It has moved from EVEN to FRONT at step 21."""
    course = after(Course(), 20, measured, EVEN)
    assert course.wanted is not None
    return course.moved(course.wanted, 21, EVEN, 0.5)


def test_what_pays_is_wanted() -> None:
    course = after(Course(), 20, STEP, EVEN)
    assert course.wanted is not None and course.wanted.layout == FRONT and not course.wanted.back
    assert "the move pays" in course.why and course.wanted.before == STEP
    predicted = advice(HEAVY, EVEN, 20)(course)
    saved = predicted.present_time.seconds - predicted.proposed_time.seconds
    assert course.wanted.predicted_gain == pytest.approx(saved / 100.0), "a share of the step as the clock has it"


def test_what_does_not_pay_is_not() -> None:
    course = Course().after(RULES, 20, STEP, EVEN, HEAVY, advice(HEAVY, EVEN, 20, cost=1e6))
    assert course.wanted is None and "too little time is lost" in course.why


def test_where_nothing_fits_nothing_moves() -> None:
    def none(course: Course) -> Advice:
        raise LayoutError("block.0 has 9 bytes")

    course = Course().after(RULES, 20, STEP, EVEN, HEAVY, none)
    assert course.wanted is None and course.why == "block.0 has 9 bytes"


def test_a_move_waits_for_steps_enough_to_be_judged() -> None:
    course = after(moved(), 24, Measured(80.0, 0.5, 2), FRONT)
    assert course.verdict is None and course.history.open is not None and course.wanted is None


def test_what_could_not_be_judged_waits_for_steps() -> None:
    course = after(Course(), 20, Measured(100.0, 100.0, 1), EVEN)
    assert course.wanted is None and course.needs_steps and "1, before a move 4" in course.why
    course = after(course, 24, STEP, EVEN)
    assert course.wanted is not None and not course.needs_steps


@pytest.mark.parametrize(
    ("seconds", "verdict", "gain"),
    [(85.0, MoveVerdict.KEPT, 0.15), (99.0, MoveVerdict.LESS, 0.01), (120.0, MoveVerdict.BACK, -0.2)],
)
def test_the_clock_judges(seconds: float, verdict: MoveVerdict, gain: float) -> None:
    course = after(moved(), 40, Measured(seconds, 0.5, 8), FRONT)
    assert course.verdict is verdict and course.gain == pytest.approx(gain)
    assert course.history.open is None and course.left is None
    assert (course.wanted is not None) == (verdict is MoveVerdict.BACK)


def test_what_may_be_noise_waits_for_more_steps_before_it_is_taken_back() -> None:
    course = after(moved(), 24, Measured(140.0, 15.0, 5), FRONT)
    assert course.verdict is None and course.history.open is not None
    assert after(course, 28, Measured(140.0, 9.0, 9), FRONT).verdict is MoveVerdict.BACK
    assert after(course, 36, Measured(120.0, 15.0, 16), FRONT).verdict is MoveVerdict.LESS


def test_back_is_where_it_came_from_and_is_not_judged() -> None:
    course = after(moved(), 40, Measured(120.0, 0.5, 8), FRONT)
    assert course.wanted is not None and course.wanted.layout == EVEN and course.wanted.back
    back = course.moved(course.wanted, 41, FRONT, 0.5)
    assert back.history.open is None and back.history.factor == 1 / 2
    assert after(back, 41, STEP, EVEN).wanted is None, "nothing is lost yet"
    assert after(back, 42, STEP, EVEN).wanted is not None


def test_other_costs_of_layers_that_stayed_leave_it_open_to_nobody() -> None:
    """Layer 0 and layers 2 and 3 stayed on their stages, layer 1 was moved."""
    dearer = profile((3.0, 1.0, 2.0, 1.0), batch=8, speeds=(1.0, 1.0))
    assert after(moved(), 40, Measured(120.0, 0.5, 8), FRONT, dearer).verdict is MoveVerdict.UNKNOWN
    assert after(moved(), 40, Measured(85.0, 0.5, 8), FRONT, dearer).verdict is MoveVerdict.KEPT, "faster all the same"
    tripled = after(moved(), 40, Measured(300.0, 0.5, 8), FRONT, dearer)
    assert tripled.verdict is MoveVerdict.BACK, "they explain too little of it"
    by_moving = profile((3.0, 4.0, 1.0, 1.0), batch=8, speeds=(1.0, 1.0))
    assert after(moved(), 40, Measured(120.0, 0.5, 8), FRONT, by_moving).verdict is MoveVerdict.BACK


def test_micro_batches_of_another_size_are_no_other_costs() -> None:
    """A layer takes half as long for half of the samples."""
    halved = replace(profile((1.5, 0.5, 0.5, 0.5), batch=8, speeds=(1.0, 1.0)), micro_batch_size=1)
    whole = replace(HEAVY, micro_batch_size=2)
    course = after(Course(), 20, STEP, EVEN, whole)
    assert course.wanted is not None
    course = after(course.moved(course.wanted, 21, EVEN, 0.5), 40, Measured(85.0, 0.5, 8), FRONT, halved)
    assert course.verdict is MoveVerdict.KEPT and course.gain == pytest.approx(0.15)


def test_what_fails_waits() -> None:
    course = after(Course(), 20, STEP, EVEN).failed(22)
    assert after(course, 22, STEP, EVEN).wanted is None, "as much has to be lost again"
    assert after(course, 23, STEP, EVEN).wanted is not None


def test_a_switch_of_somebody_else_leaves_nothing_to_judge() -> None:
    course = moved().overtaken(30)
    assert course.history.open is None and after(course, 40, Measured(500.0, 0.5, 8), FRONT).verdict is None


def test_time_lost_counts_from_a_switch_of_somebody_else() -> None:
    course = after(Course(), 20, STEP, EVEN).overtaken(390)
    assert course.history.since == course.history.step == 390 and course.history.rivals == ()


def test_a_load_goes_back_behind_the_last_window() -> None:
    course = Course(history=DecisionHistory(step=900, since=900)).at(210, 0, Slow())
    assert (course.history.step, course.history.since) == (210, 210)


def test_every_digit_of_it_travels() -> None:
    for course in (Course(), after(Course(), 20, STEP, EVEN), moved()):
        course = replace(course.at(20, 7, Slow({3: 17})), slowdown=Slowdown(EVEN, 1 / 3, 0.1))
        assert from_record(Course, json.loads(json.dumps(to_record(course)))) == course
    wanted = WantedMove(FRONT, 0.1, "why", STEP, Costs((1 / 3,), (0.1,)), (2, 3), back=True)
    assert from_record(WantedMove, json.loads(json.dumps(to_record(wanted)))) == wanted


# ---- steps by the clock ----------------------------------------------------------------------------------------------


def test_the_middle_of_the_last_steps() -> None:
    steps = StepSeconds()
    assert steps.measured() == Measured(0.0, 0.0, 0)
    steps.add(3.0)
    assert steps.measured() == Measured(3.0, 3.0, 1)
    for seconds in (1.0, 2.0, 9.0):
        steps.add(seconds)
    assert steps.measured().seconds == 2.5 and steps.measured().count == 4
    newest = steps.measured(1)
    assert newest.seconds == 9.0 and newest.count == 1 and 0 < newest.error < 9.0 * 2
    for _ in range(20):
        steps.add(1.0)
    assert steps.measured() == Measured(1.0, 0.0, 16)
    steps.add(5.0)
    steps.forget(but=2)
    assert steps.measured() == Measured(3.0, steps.measured().error, 2)
    steps.forget()
    assert steps.measured().count == 0


# ---- who counts as slow ----------------------------------------------------------------------------------------------


def test_a_member_counts_as_slow_after_windows_in_a_row() -> None:
    members, slow = (4, 7, 9), Slow()
    for step, speeds in ((10, (1.0, 0.5, 1.0)), (16, (1.0, 0.6, 0.79))):
        slow = slow.after(members, speeds, step, 1.25)
    assert slow.since == {7: 10, 9: 16} and slow.counted(16, 6) == {7}
    slow = slow.after(members, (1.0, 0.9, 0.7), 22, 1.25)
    assert slow.since == {9: 16} and slow.counted(22, 6) == {9}
    assert slow.after(members, (1.0, 0.1, 0.1), 28, None) == Slow()


# ---- answers to a slow member ----------------------------------------------------------------------------------------


def slowed(shape: dict[str, Any], speeds: tuple[float, ...], refused: Callable[..., bool]) -> Advice:
    data = len(speeds)
    found = profile((1.0,), batch=24, speeds=speeds)
    at = Situation(
        Layout(data=data, zero_stage=1),
        lambda layout: 1,
        50,
        DecisionHistory(),
        RULES,
        pipeline=False,
        **shape,
    )
    return advise(found, at, lambda layout, without: None if refused(layout, without) else MoveCost(0, 0.1))


def never(layout: Layout, without: tuple[int, ...]) -> bool:
    return False


def test_who_does_not_count_as_slow_is_as_fast_as_all() -> None:
    found = slowed({}, (1.0, 0.5, 1.0, 1.0), never)
    assert found.proposed == found.present and found.decision.answer is Answer.SMALL


def test_shares_or_letting_go() -> None:
    one = {"slow": frozenset({1})}
    assert slowed(one, (1.0, 0.5, 1.0, 1.0), never).proposed.shares == (7, 3, 7, 7)
    gone = slowed(one, (1.0, 0.01, 1.0, 1.0), never)
    assert gone.proposed.data == 3 and gone.without == (1,) and "lets go of rank 1" in str(gone)
    kept = slowed(one, (1.0, 0.01, 1.0, 1.0), lambda layout, without: bool(without))
    assert kept.proposed.shares == (8, 1, 8, 7) or kept.without == ()
    spare = slowed({**one, "spares": 1}, (1.0, 0.25, 1.0, 1.0), never)
    assert spare.proposed.data == 4 and spare.proposed.shares is None and spare.without == (1,)


# ---- slow-downs that come and go -------------------------------------------------------------------------------------

EVERY, SAMPLES = 10, 24
"""Steps from one window to the next, and samples of a step on two members."""


def loss(shares: tuple[int, int], speed: float) -> float:
    """Seconds above those of the best shares of this moment, in the steps between two windows."""
    took = [max(mine, (SAMPLES - mine) / speed) for mine in range(1, SAMPLES)]
    return 3.0 * EVERY * (max(shares[0], shares[1] / speed) - min(took))


def lost(speeds: Sequence[float], cost: float) -> tuple[float, int, Course]:
    """What a job loses, with what its moves cost, and their number. speeds: of member 1, from window to window."""
    course, layout, total, moves = Course(), Layout(data=2, zero_stage=1), 0.0, 0
    for window, speed in enumerate(speeds, start=1):
        step = window * EVERY
        total += loss(layout.shares or (SAMPLES // 2, SAMPLES // 2), speed)
        found = replace(profile((1.0,), batch=SAMPLES, speeds=(1.0, speed)), micro_batch_size=1)
        slow = course.slow.after((0, 1), found.speeds, step, RULES.slow_ratio)
        course, present = course.at(step, 0, slow), layout

        def ask(course: Course, step: int = step, found: Profile = found, present: Layout = present) -> Advice:
            ranks = course.slow.counted(step, RULES.slow_seen_steps)
            known = {"slow": ranks, "slowdown": course.slowdown, "pipeline": False}
            at = Situation(present, lambda layout: 1, step, course.history, RULES, **known)
            return advise(found, at, lambda layout, without: None if without else MoveCost(0, cost))

        course = course.after(RULES, step, Measured(1.0, 0.0, 8), present, found, ask)
        if course.wanted is not None:
            layout, moves, total = course.wanted.layout, moves + 1, total + cost
            course = course.moved(course.wanted, step, present, cost)
            course = replace(course, history=replace(course.history, open=None))
    return total, moves, course


def least(speeds: Sequence[float], cost: float) -> float:
    """What is lost at least, by whoever knows all speeds before."""
    best = {(mine, SAMPLES - mine): 0.0 if 2 * mine == SAMPLES else cost for mine in range(1, SAMPLES)}
    for speed in speeds:
        best = {shares: before + loss(shares, speed) for shares, before in best.items()}
        moved = min(best.values()) + cost
        best = {shares: min(each, moved) for shares, each in best.items()}
    return min(best.values())


SLOWNESS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=4)


@settings(max_examples=12, deadline=None)
@given(SLOWNESS, st.sampled_from([0.3, 0.5, 0.7]), st.floats(0.5, 12))
def test_a_job_loses_at_most_three_times_what_it_must(
    phases: list[tuple[int, int]], speed: float, windows: float
) -> None:
    """Whatever comes. Three times what is lost by whoever knows it before, and by doing nothing.

    Beside that, a slow member is found in its second window, and every move waits for the end of a window.
    """
    speeds = [each for well, slow in phases for each in [1.0] * well + [speed] * slow]
    even, worst = (
        (SAMPLES // 2, SAMPLES // 2),
        max(loss((12, 12), speed), max(loss((k, 24 - k), 1.0) for k in (12, 18))),
    )
    total, moves, _ = lost(speeds, cost := windows * loss(even, speed))
    unseen = 2 * worst * (moves + 1)
    assert total <= 3 * least(speeds, cost) + unseen
    assert total <= 3 * sum(loss(even, each) for each in speeds) + unseen
    assert moves <= 2 * len(phases)


def test_the_share_of_a_slow_down_that_is_removed() -> None:
    """At half of the speed, 16 and 8 samples take 48 s instead of 72 s; well members take 36 s for 12 samples each."""
    _, moves, course = lost([1.0] * 3 + [0.5] * 20 + [1.0] * 10, cost=30.0)
    assert moves == 2 and course.slowdown is not None
    alone, taken = course.slowdown.alone_seconds, course.slowdown.lost_seconds
    assert alone == 19 * EVERY * 36, "from the window that found it on"
    assert taken == alone / 19 + 18 * EVERY * 12 + EVERY * 12 + 60
    assert f"{1 - taken / alone:.2f} of the slow-down is removed" in str(course.slowdown)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([1.0, 0.8, 0.5, 0.3]), min_size=1, max_size=40), st.floats(0.5, 12))
def test_it_never_loses_much_more_than_by_doing_nothing(speeds: list[float], windows: float) -> None:
    even, cost = (SAMPLES // 2, SAMPLES // 2), windows * loss((12, 12), 0.5)
    total, moves, _ = lost(speeds, cost)
    nothing = sum(loss(even, each) for each in speeds)
    assert total <= 3 * nothing + 2 * loss(even, 0.3) * (moves + 1)
    assert moves == 0 or nothing >= cost
