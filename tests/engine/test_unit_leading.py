"""Where the leader of a change goes: layout and members, by who stays, who comes, and what was tried already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynatrain.engine.members import leading
from ds_dynatrain.engine.members.leading import WITH_NEWCOMERS, Leader
from ds_dynatrain.engine.members.policy import Rule, rule_of
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.surroundings import Candidates
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout

IDS = ("a/0", "b/0", "c/0", "d/0")


def nothing_refused(layout: Layout, processes: int) -> None:
    """Every layout can be had."""


def target(
    members: tuple[str, ...],
    tries: int = 0,
    rule: Rule | None = None,
    check: Any = nothing_refused,
    restores: bool = False,
    data: int = 2,
) -> tuple[Layout, tuple[int, ...]] | None:
    """Of a job in which the first `data` of `IDS` train, and `members` are those of the next generation."""
    roll = Roll().extended(IDS)
    candidates = Candidates(0, {roll.numbers[one]: one for one in members})
    world = SimpleNamespace(members=members, generation=5)
    change = SimpleNamespace(world=world, known=roll, candidates=candidates, tries=tries, restores=restores)
    present = tuple(range(data))
    engine = SimpleNamespace(layout=Layout(data=data, zero_stage=1), members=present, vps=None)
    elastic = SimpleNamespace(rule=rule or rule_of("data"))
    made = Leader(engine, elastic, SimpleNamespace(check=check))  # type: ignore[arg-type]
    return made._target(change)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def lowest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots go to the lowest numbers: who gets which is `plan.slots`' affair."""
    monkeypatch.setattr(leading, "assign_slots", lambda vps, layout, able, nodes: tuple(able)[: layout.world_size])


def test_newcomers_get_a_share() -> None:
    assert target(IDS) == (Layout(data=4, zero_stage=1), (0, 1, 2, 3))


def test_those_that_stay_take_over_from_those_that_go() -> None:
    assert target(("b/0",)) == (Layout(data=1, zero_stage=1), (1,))


def test_a_change_that_fails_twice_leaves_the_newcomers_out() -> None:
    assert target(IDS, tries=WITH_NEWCOMERS) == (Layout(data=2, zero_stage=1), (0, 1))
    assert target(("b/0", "c/0"), tries=WITH_NEWCOMERS) == (Layout(data=1, zero_stage=1), (1,))


def test_nothing_moves_where_no_larger_layout_can_be_had() -> None:
    def at_most_two(layout: Layout, processes: int) -> None:
        if layout.data > 2:
            raise SwitchRefused("too wide")

    assert target(IDS, check=at_most_two) == (Layout(data=2, zero_stage=1), (0, 1))


def test_there_is_no_way_for_too_few() -> None:
    table = rule_of({"2": {"data": 2}})
    assert target(("b/0",), rule=table) is None
    assert target(("a/0", "b/0", "c/0"), rule=table) == (Layout(data=2, zero_stage=1), (0, 1))


def test_restoring_takes_the_first_members_of_the_world() -> None:
    assert target(("c/0", "a/0"), restores=True, data=3) == (Layout(data=2, zero_stage=1), (2, 0))
    assert target(("c/0",), rule=rule_of({"2": {"data": 2}}), restores=True) is None
