"""The fewest members that are enough, and when nodes without work leave: pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from ds_dynatrain.balance.advice import Advice, MoveCost, Situation, advise
from ds_dynatrain.balance.choose import Members, Search, choose
from ds_dynatrain.balance.config import BalanceConfig as Rules
from ds_dynatrain.balance.course import Course
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.decision import Answer, DecisionHistory, MoveVerdict, PastMove, Slow
from ds_dynatrain.balance.extension import Balance
from ds_dynatrain.balance.step_time import step_time
from ds_dynatrain.balance.window import Measured
from ds_dynatrain.errors import ConfigError, LayoutError
from ds_dynatrain.space.columns import Columns
from ds_dynatrain.space.layout import Layout
from tests.balance.profiles import profile

RULES = Rules(members="release")
FOUR = Layout(pipe=4, data=1, zero_stage=1, boundaries=(0, 2, 4, 6, 8))
TWO = Layout(pipe=2, data=1, zero_stage=1, boundaries=(0, 7, 8))
ONE_LARGE = (*(0.125,) * 7, 1.0)
"""Seconds of layers of which the last takes longer than all others: two stages are nearly as fast as any more."""
STEP = Measured(100.0, 0.1, 8)


def longest(batch: int) -> Callable[[Layout], int]:
    """As jobs cut it: micro-batches of one sample."""
    return lambda layout: Columns.of(batch, 1, layout.data, layout.shares).longest


def enough(seconds: tuple[float, ...], members: int, slower: float, batch: int = 64) -> Layout:
    found = profile(seconds, batch=batch)
    search = Search(zero_stages=(1,), count=2, accumulation=longest(batch), at_most_slower=slower)
    start = Layout(zero_stage=1)
    return choose(found, start, Members((1.0,) * members, are_placed=True), search, of_one_pipeline)[0].layout


def of_one_pipeline(layout: Layout) -> bool:
    return layout.data > 1


@pytest.mark.parametrize("slower", [0.0, 0.01, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("seconds", [ONE_LARGE, (1.0,) * 8, (0.4, *(1.0,) * 3, 2.0, 0.3)])
def test_the_fewest_by_trying_all(seconds: tuple[float, ...], slower: float) -> None:
    found, search = profile(seconds, batch=8), Search(zero_stages=(1,), count=1, accumulation=longest(8))
    among, start = [Members((1.0,) * count, are_placed=True) for count in range(1, 7)], Layout(zero_stage=1)
    steps = [choose(found, start, each, search, of_one_pipeline)[0].seconds for each in among]
    wanted = next(count for count, each in enumerate(steps, 1) if each <= (1 + slower) * min(steps) * (1 + 1e-9))
    assert enough(seconds, 6, slower, batch=8).world_size == wanted


def test_of_equal_ones_that_with_fewer_members() -> None:
    """With one micro-batch stages wait for each other, and messages cost nothing: all numbers of them are as fast."""
    assert enough((1.0,) * 8, 4, 0.0, batch=1) == Layout(zero_stage=1)


def test_nothing_fits() -> None:
    with pytest.raises(LayoutError):
        choose(profile(), Layout(zero_stage=1), Members((1.0,), memory_bytes=1), Search(at_most_slower=0.5))


def test_memory_may_need_more_members() -> None:
    found, start, search = profile(ONE_LARGE, batch=1), Layout(zero_stage=1), Search(zero_stages=(1,))
    least = next(
        room
        for room in range(1000, 100_000, 1000)
        if not _raises(lambda room=room: choose(found, start, Members((1.0,) * 2, room), search))  # type: ignore[misc]
    )
    search = Search(zero_stages=(1,), at_most_slower=1.0)
    assert choose(found, start, Members((1.0,) * 4, least), search)[0].layout.world_size == 2


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except LayoutError:
        return True
    return False


def asked(
    present: Layout, seconds: tuple[float, ...] = ONE_LARGE, rules: Rules = RULES, step: int = 500, **more: Any
) -> Advice:
    found = profile(seconds, batch=64, speeds=(1.0,) * present.world_size)
    given = {"step_seconds": 0.0, "pause_seconds": 0.5, **more}
    history = given.pop("history", DecisionHistory())
    at = Situation(present, longest(64), step, history, rules, **given)
    return advise(found, at, lambda layout, without: MoveCost(1, 1.0))


def test_two_of_four_are_enough() -> None:
    found = asked(FOUR, rules=Rules(members="idle", at_most_slower=0.05))
    assert found.proposed == TWO and found.decision.acts and found.at_work == 0.5 and found.release is None
    assert "2 of 4 members are enough, 2 may go" in str(found)
    assert found.proposed_time.seconds <= 1.05 * asked(FOUR, rules=Rules()).proposed_time.seconds


def test_members_that_keep_are_as_before() -> None:
    found = asked(FOUR, rules=Rules(), spares=3, vacant=3)
    assert found.proposed.pipe == 4 and found.at_work == 1.0 and found.release is None


def test_idle_members_work_again_where_costs_rise() -> None:
    found = asked(TWO, seconds=(1.0,) * 8, spares=2, vacant=2)
    assert found.proposed == FOUR and found.decision.acts


@pytest.mark.parametrize("spares", [0, 1, 2])
def test_nodes_that_come_are_used(spares: int) -> None:
    assert asked(TWO, seconds=(1.0,) * 8, spares=spares).proposed.pipe == 2 + spares


def test_what_wobbles_moves_nobody() -> None:
    """A step is slower than with all members by more than one percent, and by less than what is worth a move."""
    rules = Rules(members="idle", at_most_slower=0.01)
    wobbling = asked(TWO, seconds=(*(0.145,) * 7, 1.0), rules=rules, spares=2)
    assert wobbling.proposed.pipe > 2 and wobbling.decision.answer is Answer.SMALL


def test_a_slow_member_is_none_of_the_few() -> None:
    found = asked(FOUR, slow=frozenset({0}), rules=Rules(members="idle", at_most_slower=0.05))
    assert 0 in found.without or found.proposed.world_size == 4


# ---- nodes without work ----------------------------------------------------------------------------------------------


def released(**more: Any) -> Advice:
    return asked(TWO, **{"spares": 2, "vacant": 2, **more})


def test_nodes_without_work_leave() -> None:
    found = released()
    assert found.proposed == TWO and found.release is not None and found.release.acts
    assert "nodes without work leave: the move pays" in str(found)


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ({"step": 3}, Answer.ACT),
        ({"pause_seconds": 1e6}, Answer.DEAR),
        ({"history": DecisionHistory(step=499, since=500)}, Answer.DEAR),
        ({"history": DecisionHistory(open=PastMove(0.1, 1.0, 0.0))}, Answer.OPEN),
    ],
)
def test_when_they_leave(more: dict[str, Any], answer: Answer) -> None:
    """They stay until their members have waited for as long as two changes of members cost."""
    found = released(**more)
    assert found.release is not None and found.release.answer is answer


@pytest.mark.parametrize("more", [{"vacant": 0}, {"rules": Rules(members="idle")}])
def test_none_leave(more: dict[str, Any]) -> None:
    assert released(**more).release is None


def after(course: Course, step: int, measured: Measured, present: Layout, **more: Any) -> Course:
    found = profile(more.get("seconds", ONE_LARGE), batch=64, speeds=(1.0,) * present.world_size)
    rules = Rules(members="release", at_most_slower=0.05)

    def ask(course: Course) -> Advice:
        return asked(present, rules=rules, step=step, history=course.history, **more)

    return course.after(rules, step, measured, present, found, ask)


def packed() -> Course:
    """Four members worked until step 21; two of them are free."""
    course = after(Course(), 20, STEP, FOUR)
    assert course.wanted is not None and course.wanted.layout == TWO and course.wanted.at_work == 0.5
    return course.moved(course.wanted, 21, FOUR, 0.5)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(104.0, MoveVerdict.KEPT), (90.0, MoveVerdict.KEPT), (110.0, MoveVerdict.BACK)],
)
def test_a_step_may_be_a_little_slower(seconds: float, verdict: MoveVerdict) -> None:
    course = after(packed(), 40, Measured(seconds, 0.1, 16), TWO, spares=2, vacant=2)
    assert course.verdict is verdict
    assert (course.wanted is not None and course.wanted.layout == FOUR) == (verdict is MoveVerdict.BACK)


def test_nodes_leave_once_the_move_was_judged_and_are_asked_once() -> None:
    course, idle = packed(), {"spares": 2, "vacant": 2, "pause_seconds": 500.0}
    assert course.freed == 2
    assert not after(course, 24, Measured(104.0, 0.1, 2), TWO, **idle).releases
    course = after(course, 40, Measured(104.0, 0.1, 16), TWO, **idle)
    assert course.releases and course.wanted is None and course.freed == 2
    assert not after(course, 44, Measured(104.0, 0.1, 16), TWO, **idle).releases
    assert not after(course, 60, Measured(104.0, 0.1, 16), TWO).releases


def test_who_works_again_is_not_free() -> None:
    course = packed()
    assert course.overtaken(22, 3, 2).freed == 1 and course.overtaken(22, 9, 2).freed == 0
    assert course.overtaken(22, 1, 2).freed == 2 and course.overtaken(22).freed == 2
    back = after(course, 40, Measured(110.0, 0.1, 16), TWO)
    assert back.wanted is not None and back.moved(back.wanted, 41, TWO, 0.5).freed == 0


def test_another_switch_may_use_who_was_let_go() -> None:
    course = dataclasses.replace(packed(), let_go=(3,))
    assert after(course, 40, Measured(104.0, 0.1, 16), TWO).let_go == (3,)
    assert course.overtaken(22).let_go == ()


def test_costs_that_go_up_and_down_send_no_node_away() -> None:
    """Members may become idle and work again, but all nodes stay; they leave once costs have settled."""
    course, present, changes, sizes = Course(), FOUR, [0], set[int]()
    for step in range(20, 1000, 40):
        if step % 120 == 100 and step <= 580:
            changes.append(step)
        seconds = (1.0,) * 8 if len(changes) % 2 else ONE_LARGE
        found = profile(seconds, batch=64)
        now = step_time(found, present, Deal.of(found, present, 64, True)).seconds
        idle = 4 - present.world_size
        course = course.at(step, changes[-1], Slow())
        more = {"seconds": seconds, "spares": idle, "vacant": idle, "pause_seconds": 50 * now}
        course = after(course, step, Measured(now, 0.01, 16), present, **more)
        if course.releases:
            break
        sizes.add(present.world_size)
        wanted = course.wanted
        if wanted is not None:
            course, present = course.moved(wanted, step + 1, present, 0.5), wanted.layout
    assert course.releases and step > 680 and present.world_size == 2 and sizes == {2, 4}


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_release_needs_a_launch_whose_nodes_come_and_go() -> None:
    class Settings:
        balance = Rules(members="release")

    balance = Balance(Settings())  # type: ignore[arg-type]
    balance.check_launch(True)
    with pytest.raises(ConfigError, match=r'members is "release".* --rdzv-backend=dynatrain, or give "idle"'):
        balance.check_launch(False)


@pytest.mark.parametrize("given", [{"at_most_slower": -0.1}, {"at_most_slower": 1.5}, {"members": "go"}])
def test_bad_values(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Rules(**given)
