"""Several engines of a process: memory is looked at for all at once; a loop that never comes back is told so."""

from __future__ import annotations

import pytest

from ds_dynatrain.engine.elastic_membership import SPARE, Rounds
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.reshard import feasible
from ds_dynatrain.reshard.targets import NodeMemory

NODES = {0: "a", 1: "a", 2: "b"}


def on_host(*needs: int) -> feasible.Needs:
    """What each member allocates there."""
    return {(member, "cpu"): need for member, need in enumerate(needs)}


@pytest.mark.parametrize(("free", "fits"), [(60, True), (59, False)])
def test_all_engines_of_a_node_count(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    """10 + 20 bytes of one engine and 30 of the other on node a; what node b needs is no matter here."""
    monkeypatch.setattr(feasible, "available_bytes", lambda: free)
    memory = NodeMemory(0, [lambda: on_host(10, 20, 500), lambda: on_host(0, 30, 500)], NODES)
    for _ in range(2):
        if fits:
            memory.check()
        else:
            with pytest.raises(SwitchRefused, match="need 60 bytes"):
                memory.check()


def test_what_one_has_taken_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr(feasible, "available_bytes", lambda: free[0])
    memory = NodeMemory(0, [lambda: on_host(40), lambda: on_host(50)], NODES)
    memory.check()
    free[0] -= 40
    memory.check()


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
    for is_discarded in (False, True, True):
        rounds.begin()
        for _ in range(long):
            rounds.stay(3, is_discarded)
    for _ in range(3 * long):
        rounds.stay(3, False)
    rounds.begin()
    for _ in range(10 * SPARE):
        rounds.stay(2, False)
