"""Slots against all assignments there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan import assign_slots, bytes_sent, plan_switch, slot_costs
from ds_dynatrain.space import FROZEN, Layout, LogicalTensor, ZeroRules
from tests.plan.simulate import lacking_bytes
from tests.space.models import layouts, space, tensor_lists, weight_sizes, zero_rules
from tools.minimum import bytes_minimum

TENSORS = [
    LogicalTensor("a", (7, 5)),
    LogicalTensor("b", (7,)),
    LogicalTensor("c", (11,), 1),
    LogicalTensor("f", (5,), FROZEN),
]
RULES = ZeroRules(sub_group_size=12)
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")


@settings(deadline=None, max_examples=120)
@given(tensor_lists(), zero_rules, layouts, layouts, weight_sizes, st.sets(st.integers(0, 5), min_size=4, max_size=5))
def test_no_assignment_moves_fewer_bytes(
    tensors: list[LogicalTensor],
    rules: ZeroRules,
    source: Layout,
    target: Layout,
    weight: int,
    candidates: set[int],
) -> None:
    vps = space(tensors, rules, source, tuple(range(source.data)), weight)
    order = sorted(candidates)
    cost = {
        (member, slot): lacking_bytes(
            tensors, rules, (source, member if member < source.data else None), (target, slot), weight, KINDS
        )
        for member in order
        for slot in range(target.data)
    }
    assert slot_costs(vps, target, order, KINDS).tolist() == [
        [cost[member, slot] for slot in range(target.data)] for member in order
    ]
    members = assign_slots(vps, target, candidates, kinds=KINDS)
    allowed = [choice for choice in itertools.permutations(order, target.data) if 0 not in candidates or choice[0] == 0]
    least = min(sum(cost[member, slot] for slot, member in enumerate(choice)) for choice in allowed)
    assert sum(cost[member, slot] for slot, member in enumerate(members)) == least
    assert members in allowed
    assert bytes_sent(plan_switch(vps, target, members, KINDS)) == least


def test_usual_rank_order_moves_half_as_much_again() -> None:
    vps = space([LogicalTensor("a", (64, 64))], ZeroRules(), Layout(zero_stage=3, data=2), (0, 1))
    target = Layout(zero_stage=3, data=4)
    members = assign_slots(vps, target, range(4), kinds=KINDS)
    whole = 64 * 64 * 12
    assert members == (0, 2, 1, 3)
    assert bytes_sent(plan_switch(vps, target, members, ("master", "exp_avg", "exp_avg_sq"))) == whole * 50 // 100
    assert bytes_sent(plan_switch(vps, target, range(4), ("master", "exp_avg", "exp_avg_sq"))) == whole * 75 // 100


def test_ties_go_to_working_members_then_to_their_nodes() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=0, data=3), (4, 2, 6))
    assert assign_slots(vps, Layout(zero_stage=0, data=2), range(8)) == (4, 2)
    assert assign_slots(vps, Layout(zero_stage=0, data=3), range(8)) == (4, 2, 6)
    assert assign_slots(vps, Layout(zero_stage=0, data=4), range(8)) == (4, 2, 6, 0)
    nodes = {member: "near" if member in (4, 2, 6, 7) else "far" for member in range(8)}
    assert assign_slots(vps, Layout(zero_stage=0, data=5), range(8), nodes) == (4, 2, 6, 7, 0)


def test_the_order_in_which_candidates_are_named_does_not_matter() -> None:
    for stage in range(4):
        vps = space(TENSORS, RULES, Layout(zero_stage=stage, data=3), (5, 1, 3))
        target = Layout(zero_stage=stage, data=4)
        assert len({assign_slots(vps, target, order) for order in itertools.permutations((1, 3, 5, 7, 8))}) == 1


def test_rank_zero_leaves_with_its_member() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=1, data=3), (0, 1, 2))
    members = assign_slots(vps, Layout(zero_stage=1, data=2), (1, 2))
    assert members == (1, 2)
    assert bytes_sent(plan_switch(vps, Layout(zero_stage=1, data=2), members)) == bytes_minimum(
        vps, Layout(zero_stage=1, data=2), members
    )


def test_too_few_candidates() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=1, data=2), (0, 1))
    with pytest.raises(LayoutError, match="4 ranks and only 3 members"):
        assign_slots(vps, Layout(zero_stage=1, data=4), (0, 1, 2))
