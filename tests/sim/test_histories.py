"""Many histories, each of which has to come to rest; and mistakes put in one at a time, which have to be seen."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, put_in
from tests.sim.history import history

HISTORIES = 1000
MOST_TO_FIND = 10_000


@pytest.mark.parametrize("part", range(4))
def test_all_come_to_rest(part: int) -> None:
    for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4):
        history(seed)


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_found(name: str) -> None:
    with put_in(name), pytest.raises(AssertionError):
        for seed in range(MOST_TO_FIND):
            history(seed)


def test_a_seed_is_one_history() -> None:
    first, second = history(7), history(7)
    assert first.network.now == second.network.now
    assert first.network.worlds == second.network.worlds
