"""Where the leader of a change goes: layout and members, by who stays, who comes, and what was tried already."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynatrain.engine.members import leading
from ds_dynatrain.engine.members.leading import WITH_NEWCOMERS, Destination, Leader
from ds_dynatrain.engine.members.policy import Rule, rule_of
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.surroundings import Candidates
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout

IDS = ("a/0", "b/0", "c/0", "d/0")


def nothing_refused(layout: Layout, processes: int) -> None:
    """Every layout can be had."""


def targets(
    members: tuple[str, ...],
    tries: int = 0,
    rule: Rule | None = None,
    check: Any = nothing_refused,
    restores: bool = False,
    data: int = 2,
    beside: tuple[Layout, tuple[int, ...]] | None = None,
) -> list[Destination] | None:
    """Of a job in which the first `data` of `IDS` train, and `members` are those of the next generation."""
    roll = Roll().extended(IDS)
    candidates = Candidates(0, {roll.numbers[one]: one for one in members})
    world = SimpleNamespace(members=members, generation=5)
    change = SimpleNamespace(world=world, known=roll, candidates=candidates, tries=tries, restores=restores)
    present = tuple(range(data))
    engines = [engine_with(Layout(data=data, zero_stage=1), present, check, rule or rule_of("data"))]
    if beside is not None:
        engines.append(engine_with(*beside, check, rule_of("data")))
    made = Leader(SimpleNamespace(), engines)  # type: ignore[arg-type]
    return made._targets(change)  # type: ignore[arg-type]


def engine_with(layout: Layout, members: tuple[int, ...], check: Any, rule: Rule) -> Any:
    """One engine of a process, as far as a leader asks it."""
    targets = SimpleNamespace(check=check, rule=rule)
    return SimpleNamespace(layout=layout, members=members, vps=None, targets=targets, turn=nullcontext)


def target(members: tuple[str, ...], **given: Any) -> tuple[Layout, tuple[int, ...]] | None:
    """That of the only engine; as `targets`."""
    found = targets(members, **given)
    return None if found is None else found[0]


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


TENSORS = Layout(data=1, tensor=2, zero_stage=1)


class TestSeveralEngines:
    """They train on the same members, in whatever layouts."""

    def test_all_take_as_many_members_as_each_of_them_can(self) -> None:
        beside = TENSORS, (1, 0)
        grown = [(Layout(data=4, zero_stage=1), (0, 1, 2, 3)), (TENSORS.replace(data=2), (0, 1, 2, 3))]
        assert targets(IDS, beside=beside) == grown
        assert targets(IDS[:3], beside=beside) == [(Layout(data=2, zero_stage=1), (0, 1)), beside], "nothing moves"

    def test_none_where_one_of_them_has_no_layout(self) -> None:
        assert targets(IDS[1:2], beside=(TENSORS, (0, 1))) is None

    def test_those_that_hold_the_state_of_either_go_on(self) -> None:
        """After a death one engine may be whole on fewer members than the other."""
        alone, both = (Layout(data=1, zero_stage=0), (1,)), (Layout(data=2, zero_stage=0), (0, 1))
        found = targets(IDS[:2], data=2, beside=alone)
        assert found == [(Layout(data=2, zero_stage=1), (0, 1)), both]

    def test_restoring(self) -> None:
        found = targets(("c/0", "a/0", "b/0"), restores=True, beside=(TENSORS, (0, 1)))
        assert found == [(Layout(data=2, zero_stage=1), (2, 0)), (TENSORS, (2, 0))]


def test_a_switch_that_was_asked_for_comes_first() -> None:
    """Nothing is proposed meanwhile: members find a proposal at different times, and may be in that switch."""
    roll, said = Roll().extended(IDS[:2]), dict[str, Any]()
    engine = engine_with(Layout(data=2, zero_stage=1), (0, 1), nothing_refused, rule_of("data"))
    engine.is_switching = True
    engine.attempt = 4
    world = SimpleNamespace(members=IDS[:1], generation=5)
    change = SimpleNamespace(world=world, known=roll, candidates=Candidates(0, {0: IDS[0]}), tries=0, restores=False)
    vars(change).update(has_led=True, proposals=(), board=SimpleNamespace(post=said.__setitem__))
    leader = Leader(SimpleNamespace(roll=roll, is_torn=False), [engine])  # type: ignore[arg-type]
    leader.lead(change)  # type: ignore[arg-type]
    assert not said
    engine.is_switching = False
    leader.lead(change)  # type: ignore[arg-type]
    (proposal,) = said["change/1"]
    assert (proposal["generation"], proposal["members"]) == (5, (0,))
