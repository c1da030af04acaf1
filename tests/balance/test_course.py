"""What a window adds to the course of all members: a judgement, a decision; and what it is made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_dynatrain.balance.advice import Advice, MoveCost, Situation, advise
from ds_dynatrain.balance.config import BalanceConfig as Rules
from ds_dynatrain.balance.course import Costs, Course, WantedMove
from ds_dynatrain.balance.decision import Answer, DecisionHistory, MoveVerdict, Slow
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.window import Measured, StepSeconds
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space.layout import Layout
from tests.balance.profiles import profile

RULES = Rules(horizon_steps=1000, cooldown_steps=10)
EVEN = Layout(pipe=2, data=1, zero_stage=1, boundaries=(0, 2, 4))
FRONT = EVEN.replace(boundaries=(0, 1, 4))
HEAVY = profile((3.0, 1.0, 1.0, 1.0), batch=8, speeds=(1.0, 1.0))
STEP = Measured(100.0, 0.5, 8)


def advice(found: Profile, present: Layout, step: int, cost: float = 1.0) -> Callable[[DecisionHistory], Advice]:
    """From the library, as the engine asks it."""

    def ask(history: DecisionHistory) -> Advice:
        at = Situation(present, lambda layout: 8, step, history, RULES)
        return advise(found, at, lambda layout, without: MoveCost(1, cost))

    return ask


def after(course: Course, step: int, measured: Measured, present: Layout, found: Profile = HEAVY) -> Course:
    return course.after(RULES, step, measured, present, found, advice(found, present, step))


def moved(measured: Measured = STEP) -> Course:
    """It has moved from EVEN to FRONT at step 21."""
    course = after(Course.new(RULES), 20, measured, EVEN)
    assert course.wanted is not None
    return course.moved(course.wanted, 21, EVEN)


def test_what_pays_is_wanted() -> None:
    course = after(Course.new(RULES), 20, STEP, EVEN)
    assert course.wanted is not None and course.wanted.layout == FRONT and not course.wanted.back
    assert "the move pays" in course.why and course.wanted.before == STEP
    predicted = advice(HEAVY, EVEN, 20)(course.history)
    saved = predicted.present_time.seconds - predicted.proposed_time.seconds
    assert course.wanted.predicted_gain == pytest.approx(saved / 100.0), "a share of the step as the clock has it"


def test_what_does_not_pay_is_not() -> None:
    course = Course.new(RULES).after(RULES, 20, STEP, EVEN, HEAVY, advice(HEAVY, EVEN, 20, cost=1e6))
    assert course.wanted is None and "would not pay" in course.why


def test_where_nothing_fits_nothing_moves() -> None:
    def none(history: DecisionHistory) -> Advice:
        raise LayoutError("block.0 has 9 bytes")

    course = Course.new(RULES).after(RULES, 20, STEP, EVEN, HEAVY, none)
    assert course.wanted is None and course.why == "block.0 has 9 bytes"


def test_a_move_waits_for_steps_enough_to_be_judged() -> None:
    course = after(moved(), 24, Measured(80.0, 0.5, 2), FRONT)
    assert course.verdict is None and course.history.open is not None and course.wanted is None


def test_what_could_not_be_judged_waits_for_steps() -> None:
    course = after(Course.new(RULES), 20, Measured(100.0, 100.0, 1), EVEN)
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
    back = course.moved(course.wanted, 41, FRONT)
    assert back.history.open is None and back.history.cool_from == 40 + 20
    assert after(back, 50, STEP, EVEN).wanted is None and after(back, 61, STEP, EVEN).wanted is not None


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
    course = after(Course.new(RULES), 20, STEP, EVEN, whole)
    assert course.wanted is not None
    course = after(course.moved(course.wanted, 21, EVEN), 40, Measured(85.0, 0.5, 8), FRONT, halved)
    assert course.verdict is MoveVerdict.KEPT and course.gain == pytest.approx(0.15)


def test_what_fails_waits() -> None:
    course = after(Course.new(RULES), 20, STEP, EVEN).failed(22)
    assert course.history.cool_from == 32 and after(course, 31, STEP, EVEN).wanted is None
    assert after(course, 32, STEP, EVEN).wanted is not None


def test_a_switch_of_somebody_else_leaves_nothing_to_judge() -> None:
    course = moved().overtaken()
    assert course.history.open is None and after(course, 40, Measured(500.0, 0.5, 8), FRONT).verdict is None


def test_every_digit_of_it_travels() -> None:
    for course in (Course.new(RULES), after(Course.new(RULES), 20, STEP, EVEN), moved()):
        course = course.at((0, 7), Slow({3: 17}))
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
        DecisionHistory.new(RULES),
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
