"""Hosts that do not reach each other: who goes on, and when. What members find is told here; sockets: `test_reach`."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.elastic.links import MOST_BRANCHES, largest_reaching
from ds_dynatrain.elastic.roster import ProbeMembers
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.view import snapshot
from tests.elastic.driver import Driver

NODES = ("a", "b", "c", "d")
BOUND = 25.0
"""Twice the silence, two attempts of all at that distance, and what is between."""


def training(least: int = 1, count: int = 3, protected: str = "yes", step: int = 7, **settings: float) -> Driver:
    """A job whose members have made steps, each on a host of its own."""
    driver = Driver(Settings(least, 8, **settings))
    driver.hosts = {node: f"10.0.0.{place}:4000" for place, node in enumerate(NODES, start=1)}
    driver.start(*NODES[:count])
    driver.wait(driver.settings.recovery_seconds + 0.1)
    driver.enter()
    for member in driver.world.members:
        driver.say(member, step=step, protected=protected)
    driver.wait()
    return driver


def test_two_of_three_go_on_and_the_third_comes_back_once_it_reaches_both() -> None:
    driver = training()
    driver.part("b", "c")
    driver.wait(BOUND)
    assert driver.world.members == ("a/0", "b/0") and driver.world.lost == ("c/0",) and driver.fenced == ["c/0"]
    assert "10.0.0.3 and 10.0.0.2 do not reach each other" in driver.world.reason
    assert snapshot(driver.membership, "", driver.now).parted == ("10.0.0.2 and 10.0.0.3 do not reach each other",)
    driver.enter()
    driver.hosts["c-again"] = "10.0.0.3:4001"
    driver.part("b", "c-again")
    driver.start("c-again")
    driver.wait(60)
    assert driver.world.members == ("a/0", "b/0"), "it still does not reach b"
    driver.blocked.clear()
    driver.wait(BOUND)
    assert driver.world.members == ("a/0", "b/0", "c-again/0") and driver.world.change == "planned"
    assert not snapshot(driver.membership, "", driver.now).parted


def test_nobody_is_given_up_while_steps_are_made() -> None:
    driver = training()
    driver.part("b", "c")
    for step in range(8, 68):
        for member in driver.world.members:
            driver.say(member, step=step)
        driver.wait(1)
    assert len(driver.worlds) == 1 and not driver.fenced


def test_a_long_evaluation_is_no_reason() -> None:
    """Nothing moves, and all reach each other: that is asked less and less often."""
    driver = training()
    asked = [effect for effect in driver.wait(600) if isinstance(effect, ProbeMembers)]
    assert len(driver.worlds) == 1 and not driver.fenced
    assert 3 * 8 < len(asked) <= 3 * (600 / 60 + 4)


def test_a_moment_is_no_reason() -> None:
    driver = training()
    driver.wait(12)
    driver.part("b", "c")
    while not driver.membership.links._failures:
        driver.wait(0.5)
    driver.blocked.clear()
    driver.wait(60)
    assert len(driver.worlds) == 1 and not driver.fenced


def test_a_connection_that_can_be_made_from_one_side_is_enough() -> None:
    driver = training()
    driver.blocked.add(("b", "c"))
    driver.wait(120)
    assert len(driver.worlds) == 1 and not driver.fenced


def test_fewer_than_min_are_no_world() -> None:
    driver = training(least=3)
    driver.part("b", "c")
    driver.wait(400)
    assert len(driver.worlds) == 1 and not driver.fenced
    assert snapshot(driver.membership, "", driver.now).parted == ("10.0.0.2 and 10.0.0.3 do not reach each other",)


def test_a_node_that_waits_makes_up_for_one_that_does_not_reach_all() -> None:
    driver = training(least=3)
    driver.membership.settings = replace(driver.membership.settings, max_nodes=3)
    driver.start("d")
    driver.part("b", "c")
    driver.wait(BOUND)
    assert driver.world.members == ("a/0", "b/0", "d/0")


@pytest.mark.parametrize("protected", ["", "no"])
def test_state_that_nobody_keeps_is_waited_for(protected: str) -> None:
    """The network may come back; so long as for one that is stuck."""
    driver = training(protected=protected, stuck_seconds=120.0)
    driver.part("b", "c")
    driver.wait(115)
    assert len(driver.worlds) == 1 and not driver.fenced
    driver.wait(10)
    assert driver.world.members == ("a/0", "b/0")


def test_two_nodes_may_have_kept_each_others_state() -> None:
    driver = training(count=4, stuck_seconds=120.0)
    for one in ("a", "b"):
        for other in ("c", "d"):
            driver.part(one, other)
    driver.wait(115)
    assert not driver.fenced
    driver.wait(10)
    assert driver.world.members == ("a/0", "b/0") and driver.fenced == ["c/0", "d/0"]


def test_a_generation_that_is_never_entered() -> None:
    """The same where its groups cannot be built, and members say so again and again."""
    driver = training()
    driver.part("b", "c")
    begin = driver.now
    while driver.world.members == ("a/0", "b/0", "c/0"):
        assert driver.now < begin + BOUND
        for member in driver.world.members:
            driver.say(member, broken=driver.world.generation)
        driver.wait(3)
    assert driver.world.members == ("a/0", "b/0")


def test_a_job_that_has_made_no_step_has_nothing_to_lose() -> None:
    driver = training(count=2, protected="no", step=0)
    driver.part("a", "b")
    driver.wait(BOUND)
    assert driver.world.members == ("a/0",) and driver.fenced == ["b/0"]


def test_newcomers_that_do_not_reach_each_other_are_not_let_in_together() -> None:
    driver = training(count=3)
    driver.part("b", "c")
    driver.wait(BOUND)
    driver.enter()
    driver.die("b/0")
    driver.wait()
    driver.enter()
    driver.hosts |= {"b-again": "10.0.0.2:4001", "c-again": "10.0.0.3:4001"}
    driver.part("b-again", "c-again")
    driver.start("c-again", "b-again")
    driver.wait(60)
    assert driver.world.members == ("a/0", "c-again/0")


Pairs = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20)


@given(st.integers(1, 8), Pairs)
def test_the_largest_set(count: int, pairs: set[tuple[int, int]]) -> None:
    """Of all sets, by trying each; of equal ones that with the first nodes."""
    parted = {frozenset(pair) for pair in pairs if len(set(pair)) == 2}
    best = next(
        some
        for size in range(count, 0, -1)
        for some in combinations(range(count), size)
        if not any(frozenset(pair) in parted for pair in combinations(some, 2))
    )
    assert largest_reaching(range(count), lambda one, other: frozenset((one, other)) in parted) == best


def test_half_of_many_is_found_at_once() -> None:
    """A switch between two halves has failed."""
    count, asked = 200, 0

    def are_parted(one: int, other: int) -> bool:
        nonlocal asked
        asked += 1
        return (one < count // 2) != (other < count // 2)

    assert largest_reaching(range(count), are_parted) == tuple(range(count // 2))
    assert asked <= count * count < 10 * MOST_BRANCHES
