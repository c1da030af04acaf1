"""Memory of a change in which several engines take part: looked at once, and for all of them together."""

from __future__ import annotations

import pytest

from ds_dynatrain.engine import feasible
from ds_dynatrain.engine.members.room import Room
from ds_dynatrain.errors import SwitchRefused

NODES = {0: "a", 1: "a", 2: "b"}


@pytest.mark.parametrize(("free", "fits"), [(60, True), (59, False)])
def test_all_engines_of_a_node_count(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    """10 + 20 bytes of one engine and 30 of the other on node a; what node b needs is no matter here."""
    monkeypatch.setattr(feasible, "available_bytes", lambda: free)
    room = Room(0, [lambda: {0: 10, 1: 20, 2: 500}, lambda: {1: 30, 2: 500}], NODES)
    for _ in range(2):
        if fits:
            room.check()
        else:
            with pytest.raises(SwitchRefused, match="need 60 bytes"):
                room.check()


def test_what_one_has_taken_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr(feasible, "available_bytes", lambda: free[0])
    room = Room(0, [lambda: {0: 40}, lambda: {0: 50}], NODES)
    room.check()
    free[0] -= 40
    room.check()
