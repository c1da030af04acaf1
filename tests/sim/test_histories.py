"""Many histories, each of which has to come to rest; and mistakes put in one at a time, which have to be seen."""

from __future__ import annotations

import pytest

from tests.sets import one_in
from tests.sim.bugs import BUGS, IN_A_LAUNCH, Bug, put_in
from tests.sim.fixed import launch
from tests.sim.history import history

HISTORIES, PARTS = 2000, 8
LAUNCHES = 1000
MOST_TO_FIND = 20_000


@pytest.mark.parametrize("part", one_in(PARTS, range(PARTS)))
def test_all_come_to_rest(part: int) -> None:
    for seed in range(part * HISTORIES // PARTS, (part + 1) * HISTORIES // PARTS):
        history(seed)


@pytest.mark.parametrize("part", one_in(PARTS, range(PARTS)))
def test_all_come_to_rest_where_hosts_lose_each_other(part: int) -> None:
    for seed in range(part * HISTORIES // PARTS, (part + 1) * HISTORIES // PARTS):
        history(seed, parts=True)


@pytest.mark.parametrize("part", one_in(2, range(2)))
def test_all_come_to_rest_where_the_script_asks_for_switches(part: int) -> None:
    for seed in range(part * HISTORIES // PARTS, (part + 1) * HISTORIES // PARTS):
        history(seed, parts=bool(seed % 2), asks=True)


@pytest.mark.parametrize("part", one_in(2, range(2)))
def test_all_scripts_of_a_launch_come_to_their_ends(part: int) -> None:
    seeds = range(part * LAUNCHES // 2, (part + 1) * LAUNCHES // 2)
    ended = [one for seed in seeds for one in launch(seed).ended]
    assert all(any(one.late == late for one in ended) for late in (True, False)), "switches of both kinds"


@pytest.mark.parametrize("name", IN_A_LAUNCH)
def test_a_mistake_in_a_launch_is_found(name: str) -> None:
    bug = IN_A_LAUNCH[name]
    launch(bug.seed)
    with put_in(bug), pytest.raises(AssertionError):
        launch(bug.seed)


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_found(name: str) -> None:
    """By a history that finds nothing without it. Where the simulator has changed, the next test says by which."""
    bug = BUGS[name]
    history(bug.seed, bug.parts, bug.asks)
    with put_in(bug), pytest.raises(AssertionError):
        history(bug.seed, bug.parts, bug.asks)


@pytest.mark.full
@pytest.mark.parametrize("name", [*BUGS, *IN_A_LAUNCH])
def test_which_history_finds_it_first(name: str) -> None:
    bug = IN_A_LAUNCH.get(name) or BUGS[name]
    assert _first_to_find(bug, is_launch=name in IN_A_LAUNCH) == bug.seed


def _first_to_find(bug: Bug, is_launch: bool) -> int:
    with put_in(bug):
        for seed in range(MOST_TO_FIND):
            try:
                launch(seed) if is_launch else history(seed, bug.parts, bug.asks)
            except AssertionError:
                return seed
    raise ValueError(f"nothing in {MOST_TO_FIND} histories")


def test_a_seed_is_one_history() -> None:
    first, second = history(7), history(7)
    assert first.network.now == second.network.now
    assert first.network.worlds == second.network.worlds
