"""Where the leader of a change goes: layout and members, by who stays, who comes, and what was tried already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.membership.destinations import (
    WITH_NEWCOMERS,
    Destination,
    DestinationFacts,
    Registry,
    Rule,
    Rules,
    choose,
    destinations,
    rule_of,
)
from ds_dynatrain.space import Layout

IDS = ("a/0", "b/0", "c/0", "d/0")


def nothing_refused(layout: Layout) -> None:
    """Every layout can be had."""


def targets(
    members: tuple[str, ...],
    tries: int = 0,
    rule: Rule | None = None,
    check: Callable[[Layout], None] = nothing_refused,
    restores: bool = False,
    data: int = 2,
    beside: Destination | None = None,
) -> list[Destination] | None:
    """Of a job in which the first `data` of `IDS` train, and `members` are those of the next generation."""
    world = Generation(term="1", generation=5, change="planned", members=members)
    present = [(Layout(data=data, zero_stage=1), tuple(range(data)))] + ([] if beside is None else [beside])
    engines = [rules(present[0][0], rule or rule_of("data"), check)]
    engines += [rules(layout, rule_of("data"), check) for layout, _ in present[1:]]
    asked = DestinationFacts(world, Registry().extended(IDS), tuple(present), tries, restores)
    return destinations(asked, engines, lambda what: None)


def rules(present: Layout, rule: Rule, check: Callable[[Layout], None]) -> Rules:
    """Slots go to the lowest numbers: who gets which is `plan.slots`' affair."""
    return Rules(
        lambda members: choose(rule, members, present, check), lambda layout, able: (layout, able[: layout.world_size])
    )


def target(members: tuple[str, ...], **given: Any) -> tuple[Layout, tuple[int, ...]] | None:
    """That of the only engine; as `targets`."""
    found = targets(members, **given)
    return None if found is None else found[0]


def test_newcomers_get_a_share() -> None:
    assert target(IDS) == (Layout(data=4, zero_stage=1), (0, 1, 2, 3))


def test_those_that_stay_take_over_from_those_that_go() -> None:
    assert target(("b/0",)) == (Layout(data=1, zero_stage=1), (1,))


def test_but_not_where_the_others_have_no_layout() -> None:
    def refuse_one(layout: Layout) -> None:
        if layout.data < 2:
            raise SwitchRefused("too narrow")

    stay = ("a/0", "c/0", "d/0")
    assert target(stay, tries=WITH_NEWCOMERS, check=refuse_one) == (Layout(data=3, zero_stage=1), (0, 2, 3))
    assert target(("a/0",), check=refuse_one) is None


def test_a_change_that_fails_twice_leaves_the_newcomers_out() -> None:
    assert target(IDS, tries=WITH_NEWCOMERS) == (Layout(data=2, zero_stage=1), (0, 1))
    assert target(("b/0", "c/0"), tries=WITH_NEWCOMERS) == (Layout(data=1, zero_stage=1), (1,))


def test_nothing_moves_where_no_larger_layout_can_be_had() -> None:
    def at_most_two(layout: Layout) -> None:
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


def test_restoring_from_copies_leaves_members_in_their_places() -> None:
    """As with a change in which all live: who has a rank's copy keeps the rank."""
    layout = Layout(data=3, zero_stage=1)
    world = Generation(term="1", generation=5, change="failure", members=("a/0", "c/0", "d/0"), survivors=2)
    of_vacant = Rules(
        lambda members: choose(rule_of("data"), members, layout, nothing_refused), lambda wanted, _: (wanted, (0, 3, 2))
    )
    asked = DestinationFacts(world, Registry().extended(IDS), ((layout, (0, 1, 2)),), restores=True, has_copies=True)
    assert destinations(asked, [of_vacant], lambda what: None) == [(layout, (0, 3, 2))]


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
