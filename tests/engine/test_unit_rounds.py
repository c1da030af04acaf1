"""A loop that never comes back to the first engine after a death is told so; one that takes its time is not."""

from __future__ import annotations

import pytest

from ds_dynatrain.engine.members.rounds import SPARE, Rounds
from ds_dynatrain.errors import WorldChanged


def test_a_loop_that_waits_for_steps_is_ended() -> None:
    rounds = Rounds()
    for _ in range(3):
        rounds.begin()
        rounds.stay(2, False)
    for _ in range(SPARE + 1):
        rounds.stay(2, True)
    with pytest.raises(WorldChanged, match=r"engine 2 .* after 1 at most"):
        rounds.stay(2, True)


def test_long_rounds_are_no_fault() -> None:
    """As long as they were before, and twice that; however long, where something is trained."""
    rounds, long = Rounds(), 5 * SPARE
    for is_void in (False, True, True):
        rounds.begin()
        for _ in range(long):
            rounds.stay(3, is_void)
    for _ in range(3 * long):
        rounds.stay(3, False)
    rounds.begin()
    for _ in range(10 * SPARE):
        rounds.stay(2, False)
