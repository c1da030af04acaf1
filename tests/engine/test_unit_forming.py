"""Forming anew after a failure: what a member does of which nobody knows that it holds anything."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ds_dynatrain.engine.members.forming import Forming
from ds_dynatrain.errors import ElasticError


def agreed(survivors: int, leaving: tuple[str, ...], *, idle: bool, is_torn: bool) -> tuple[bool, list[str]]:
    """(whether member "c/0", the last of its world, agrees; what its engine was told)."""
    told = list[str]()
    members = ("a/0", "b/0")[:survivors] + ("c/0",)
    world = SimpleNamespace(generation=7, reason="b/0 lost", members=members, survivors=survivors, leaving=leaving)
    engine = SimpleNamespace(idle=idle, turn=nullcontext, give_state_up=lambda: told.append("give up"))
    elastic = SimpleNamespace(member=SimpleNamespace(id="c/0"), is_torn=is_torn)
    changes = SimpleNamespace(engines=[engine])
    change = SimpleNamespace(is_agreed=False, world=world)
    return Forming(elastic, changes).agree(change), told  # type: ignore[arg-type]


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_newcomer_that_is_left_alone_is_told_so(is_torn: bool) -> None:
    """All who held the state have died: it would wait for ever."""
    with pytest.raises(ElasticError, match="generation 7: b/0 lost; nobody is known to hold the state"):
        agreed(0, (), idle=True, is_torn=is_torn)


@pytest.mark.parametrize("survivors, leaving", [(1, ()), (2, ()), (0, ("a/0",))])
def test_a_newcomer_waits_for_those_who_hold_something(survivors: int, leaving: tuple[str, ...]) -> None:
    assert agreed(survivors, leaving, idle=True, is_torn=False) == (True, [])


def test_what_nobody_knows_of_is_given_up() -> None:
    assert agreed(1, (), idle=False, is_torn=True) == (True, ["give up"])
    assert agreed(1, (), idle=False, is_torn=False) == (True, [])
    with pytest.raises(ElasticError, match="nobody is known"):
        agreed(0, ("a/0",), idle=False, is_torn=True)
