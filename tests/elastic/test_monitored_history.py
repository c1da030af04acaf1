"""What a coordinator remembers for those who watch: time is accounted for, steps are counted once, all is bounded."""

from __future__ import annotations

import pytest

from ds_dynatrain.elastic.history import MOST_CHANGES, MOST_POINTS
from ds_dynatrain.elastic.messages import (
    LARGEST_GREETING,
    LONGEST_WORDS,
    MOST_PHASES,
    ChangeStatus,
    MemberStatus,
    Report,
    StartingNode,
    Status,
    encode,
)
from ds_dynatrain.elastic.view import standing
from tests.elastic.watched import BATCH, TERM, Told, switched


def started(*members: str) -> Told:
    """A job that has made ten steps of a second; 3 s of imports, 2 s to the first step."""
    told = Told()
    told.come(*members)
    told.now += 3
    told.publish(*members)
    told.go_on(held=0.5, seconds=2.0)
    told.steps(10, 1.0)
    return told


def lost(told: Told) -> dict[str, float]:
    return {cause: round(seconds, 6) for cause, seconds in told.history.goodput.lost(told.now).items() if seconds}


def test_a_start() -> None:
    told = started("a/0", "b/0")
    assert lost(told) == {"PROGRAM_STARTUP": 3.0, "TRAINING_PREP": 2.0}
    assert told.history.goodput.productive == 10 and told.history.goodput.elapsed(told.now) == 15
    assert told.history.goodput.ratio(told.now) == pytest.approx(10 / 15)
    counts = told.history.counts
    assert (counts.steps, counts.samples, told.history.step) == (10, 10 * BATCH, 10)


def test_a_join_costs_its_pause() -> None:
    """The members train on until the switch; what its rank 0 tells comes before they leave the boundary."""
    told = started("a/0")
    told.come("b/0")
    old = told.publish("a/0", "b/0", survivors=1)
    assert old.generation == 2
    told.history.switched(switched(2, pause_ms=250.0), told.now)
    told.go_on(held=0.25)
    told.steps(4, 1.0)
    assert lost(told)["ELASTIC_SCALE_UP"] == 0.25
    change = told.history.changes[-1]
    assert (change.kind, change.size, change.still_seconds) == ("join", 2, 0.25)


def test_a_leaver_of_rank_0_costs_the_pause_that_it_tells() -> None:
    """Whoever is rank 0 now has waited for nobody on its own clock."""
    told = started("a/0")
    told.come("b/0")
    told.publish("b/0", survivors=1, leaving=("a/0",))
    told.history.switched(switched(2, pause_ms=300.0), told.now)
    told.now += 0.3
    told.go_on(held=0.0)
    told.steps(2, 1.0)
    assert lost(told)["ELASTIC_SLICE_DOWN"] == pytest.approx(0.3)
    assert sum(lost(told).values()) == pytest.approx(5.3)


def test_what_was_done_before_a_change_and_is_told_with_it_does_not_end_it() -> None:
    """A member says at once that it has entered a generation, with steps that no heartbeat has told yet."""
    told = started("a/0")
    told.come("b/0")
    world, before = told.publish("a/0", "b/0", survivors=1), told.tallies["a/0"]
    late = before.model_copy(update={"steps": 11, "stepping_seconds": before.stepping_seconds + 1})
    told.history.reported("a/0", Report(ready=True, entered=world.generation, step=11, tally=late), world, told.now)
    assert told.history.changes[-1].still_seconds is None
    told.history.switched(switched(2, pause_ms=250.0), told.now)
    told.tallies["a/0"], told.step = late, 11
    told.go_on(held=0.25)
    assert told.history.changes[-1].still_seconds == 0.25 and lost(told)["ELASTIC_SCALE_UP"] == 0.25


def test_a_late_switch_is_told_of_after_its_pause() -> None:
    """Which has been told by then, too; it costs that once."""
    told = started("a/0")
    told.come("b/0")
    world = told.publish("a/0", "b/0", survivors=1)
    old = told.world
    told.world = world.model_copy(update={"generation": world.generation - 1})
    told.go_on(held=0.2)
    told.world = old
    told.history.switched(switched(2, pause_ms=200.0), told.now)
    told.steps(1, 1.0)
    assert lost(told)["ELASTIC_SCALE_UP"] == pytest.approx(0.2)


def test_two_joins_at_once_cost_a_pause_each() -> None:
    """The second generation is published before rank 0 tells that it has entered the first, and nobody enters one."""
    told = started("a/0")
    told.come("b/0", "c/0", "d/0")
    told.publish("a/0", "b/0", survivors=1)
    told.publish("a/0", "b/0", "c/0", survivors=2)
    newest = told.publish("a/0", "b/0", "c/0", "d/0", survivors=3)
    for generation, held in ((2, 0.25), (4, 0.5)):
        told.world = newest.model_copy(update={"generation": generation})
        told.go_on(held=held)
        told.steps(1, 1.0)
    stood = {change.generation: change.still_seconds for change in told.history.changes if change.kind == "join"}
    assert stood == {2: 0.25, 3: None, 4: 0.5}


def test_time_that_members_were_free_is_counted_by_rank_0() -> None:
    told = started("a/0", "b/0")
    for seconds in (1.5, 2.0):
        told.steps(1, 1.0, saved_member_seconds=seconds)
    assert told.history.counts.saved_member_seconds == 3.5


def test_a_death_costs_the_recovery_and_the_steps_that_are_made_again() -> None:
    told = started("a/0", "b/0")
    told.publish("a/0", change="failure", survivors=1, lost=("b/0",), reason="b/0 lost")
    assert told.history.goodput.lost(told.now + 4)["INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"] == 4, (
        "also while it lasts"
    )
    told.step = 7
    told.go_on(held=1.5)
    told.steps(5, 1.0)
    assert lost(told)["INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"] == 1.5
    assert lost(told)["WASTED_PROGRESS_FROM_DISRUPTION"] == 3.0
    history = told.history
    assert history.goodput.productive == 12 and history.step == 12
    assert (history.counts.steps, history.counts.lost_steps, history.changes[-1].lost_steps) == (15, 3, 3)
    assert history.counts.samples == 15 * BATCH
    whole = history.goodput.productive + sum(lost(told).values())
    assert whole == pytest.approx(history.goodput.elapsed(told.now))


def test_below_min_it_waits_for_nodes() -> None:
    told = started("a/0", "b/0")
    told.publish("a/0", change="failure", survivors=1, lost=("b/0",), paused=True)
    told.now += 60
    assert lost(told)["ELASTIC_SLICE_DOWN"] == 60
    told.come("c/0")
    told.publish("a/0", "c/0", survivors=1)
    told.go_on(held=61.0, seconds=1.0)
    assert lost(told)["ELASTIC_SLICE_DOWN"] == 60 and lost(told)["ELASTIC_SCALE_UP"] == 1


def test_checkpoints_and_the_scripts_own_switches() -> None:
    told = started("a/0")
    told.go_on(held=2.0, saving=1.5)
    told.steps(1, 1.0)
    told.history.switched(switched(1, pause_ms=400.0), told.now)
    told.go_on(held=0.4)
    assert lost(told)["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] == 1.5 and lost(told)["OTHER"] == 0.5
    assert lost(told)["ELASTIC_REINITIALIZATION"] == 0.4


def test_a_switch_counts_once_however_often_it_is_told() -> None:
    told = started("a/0")
    for number in (1, 2, 1, 2):
        told.history.switched(switched(number, committed=number == 1, pause_ms=100.0 * number), told.now)
    counts = told.history.counts
    assert (counts.committed, counts.rolled_back, counts.sent_bytes) == (1, 1, 2000)
    assert counts.pause_seconds == pytest.approx(0.3) and sum(counts.pauses) == 2
    assert counts.phase_seconds == pytest.approx({"drain": 0.04, "move": 0.26})


def test_another_coordinator_goes_on_where_it_finds_the_job() -> None:
    told = Told(step=500)
    told.come("a/0")
    told.publish("a/0", term="fff", begun=True, survivors=1)
    told.go_on()
    told.steps(1, 1.0)
    told.steps(5, 1.0)
    assert told.history.changes[-1].kind == "taken over" and told.history.step == 506
    assert told.history.counts.steps <= 6 and told.history.counts.samples <= 6 * BATCH
    assert told.history.goodput.productive == 6


def test_steps_are_those_of_one_member_at_a_time() -> None:
    """Rank 0 dies after it has told of more steps than the next one had; nothing counts twice, and nothing backward."""
    told = started("a/0", "b/0")
    told.publish("b/0", change="failure", survivors=1, lost=("a/0",))
    seen = [told.history.counts.steps]
    told.go_on(held=0.5)
    for _ in range(4):
        told.steps(1, 1.0)
        seen.append(told.history.counts.steps)
    assert seen == sorted(seen) and seen[-1] == 14 and told.history.step == 14


def test_all_is_bounded() -> None:
    told = started("a/0")
    for number in range(4 * MOST_POINTS):
        told.steps(1, 1.0)
        told.history.switched(switched(number + 1), told.now)
        if number < 2 * MOST_CHANGES:
            told.publish("a/0", survivors=1)
    history = told.history
    assert MOST_POINTS // 2 <= len(history.points) <= MOST_POINTS
    assert sum(point.steps for point in history.points) >= 4 * MOST_POINTS - 16, "points are merged, not dropped"
    assert len(history.changes) == len(history.switches) == MOST_CHANGES
    assert history.counts.committed == 4 * MOST_POINTS and TERM


def test_the_largest_switch_is_let_in() -> None:
    words = "\u20ac" * LONGEST_WORDS
    phases = {f"{'a' * 22}{chr(97 + place)}": 123456.789 for place in range(MOST_PHASES)}
    said = switched(1 << 52, source=words, target=words, cause=words, reason=words, phases_ms=phases)
    assert len(encode(said)) <= LARGEST_GREETING


def member(name: str, rank: int | None, **given: object) -> MemberStatus:
    fixed = {"phase": "working", "pid": 1, "entered": 2, "step": 7, "layout": "", "pause_ms": 0.0, "protected": ""}
    return MemberStatus(**{"member": name, "rank": rank, **fixed, "heard_seconds": 0.1, "waits_for": "", **given})


def of(*members: MemberStatus, **given: object) -> Status:
    ranks = tuple(one.member for one in members if one.rank is not None)
    fixed = {"job": "j", "term": TERM, "min_nodes": 2, "max_nodes": 4, "generation": 2, "changes": ()}
    return Status(**{"paused": False, "finished": False, "ranks": ranks, "members": members, **fixed, **given})


def ended(change: str) -> ChangeStatus:
    """A generation without members."""
    return ChangeStatus(generation=2, change=change, size=0, seconds_ago=1.0, reason="")


A, B = member("a/0", 0), member("b/0", 1)
B_STARTS = StartingNode(node="b", seconds=32.0)


@pytest.mark.parametrize(
    ("status", "quiet", "state", "words"),
    [
        (of(A, B), 0.5, "running", "step 7 on 2 members"),
        (of(A, B, finished=True), 0.5, "finished", "ended"),
        (of(A, paused=True), 0.5, "paused", "1 node of the 2 that training needs"),
        (of(paused=True, changes=(ended("failure"),)), 0.5, "lost", "no member has its state any more"),
        (of(paused=True, changes=(ended("planned"),)), 0.5, "waiting", "all members were told to go; 0 nodes of 2"),
        (of(A, member("b/0", 1, protected="no")), 0.5, "running", "step 7 on 2 members, unprotected"),
        (of(member("a/0", None, phase="warming"), generation=0), None, "waiting", "0 nodes of 2 ready; a still import"),
        (of(generation=0, starting=(B_STARTS,)), None, "waiting", "0 nodes of 2 ready; its workers start on b (32 s)"),
        (of(A, member("b/0", 1, entered=1)), 0.5, "changing", "generation 2 is being entered; b/0 at work on it"),
        (of(A, B), 60.0, "standing", "no step for 60 s; a/0, b/0 at work"),
        (of(A, member("b/0", 1, waits_for="member 0")), 60.0, "standing", "b/0 waits for member 0"),
        (of(A, B), None, "changing", "no step was made yet"),
    ],
)
def test_whether_it_runs_and_why_not(status: Status, quiet: float | None, state: str, words: str) -> None:
    assert standing(status, quiet, 1.0)[0] == state
    assert words in standing(status, quiet, 1.0)[1]


def test_long_steps_are_no_standstill() -> None:
    assert standing(of(A, B), 60.0, 30.0)[0] == "running"
