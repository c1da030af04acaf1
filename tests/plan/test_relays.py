"""Relays: what no member of a node has crosses to it once, and goes on inside it from the buffers of the receiver."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.plan import SwitchPlan, plan_switch, sides
from ds_dynatrain.space import Layout
from tests.plan.simulate import coordinates, play
from tests.plan.test_axes import LAYOUTS, space
from tests.plan.test_senders import SIZES, layers, members_of

WEIGHT = ("weight",)


def crossing(plan: SwitchPlan, nodes: dict[int, str]) -> int:
    """Bytes that members receive from other nodes."""
    return sum(
        exchange.receives.nbytes
        for member in plan.members
        for exchange in plan.for_member(member).exchanges
        if nodes[exchange.peer] != nodes[member]
    )


def bound(plan: SwitchPlan, nodes: dict[int, str]) -> int:
    """Bytes of weights that some member of a node needs and no member of it has, once for each node."""
    vps, target, count = plan.sides.vps, plan.sides.layout, 0
    for node in {*nodes.values()}:
        held, wanted = set[int](), set[int]()
        for rank, member in enumerate(vps.members):
            held |= coordinates(vps, vps.layout, rank, "weight") if nodes[member] == node else set()
        for rank, member in enumerate(plan.target_members):
            wanted |= coordinates(vps, target, rank, "weight") if nodes[member] == node else set()
        count += len(wanted - held)
    return count * vps.kind("weight").itemsize


@pytest.mark.parametrize("parts", [1 << 12, 3])
@settings(max_examples=6, deadline=None)
@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(0, 999))
def test_weights_cross_to_a_node_once(parts: int, before: Layout, after: Layout, seed: int) -> None:
    """Random nodes; a tensor that several shard groups of the source hold is sent by the first of them alone."""
    chance = random.Random(seed)
    target = after.replace(zero_stage=seed % 3)  # in which all ranks of a group hold weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "SMALLEST_SHARE", chance.choice([1, 5]))
        patch.setattr(sides, "RELAYED_PARTS", parts)
        nodes = {member: chance.choice("abc"[: 2 + seed % 2]) for member in range(16)}
        vps = space(before, tuple(range(before.world_size)), (2, 4)[seed % 2])
        plan = plan_switch(vps, target, chance.sample(range(16), target.world_size), WEIGHT, nodes=nodes)
        play(plan)
        crossed, least = crossing(plan, nodes), bound(plan, nodes)
    if before.pipe == before.tensor == before.expert == 1:
        assert crossed == least
    assert crossed >= least


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 99))
def test_nothing_is_relayed_on_one_node(source: dict[str, int], target: dict[str, int], seed: int) -> None:
    before, after = Layout(zero_stage=1, **source), Layout(zero_stage=seed % 3, **target)
    for nodes in ({}, dict.fromkeys(range(60), "all")):
        alone = plan_switch(layers(before), after, members_of(after, seed), WEIGHT, nodes=nodes)
        assert not any(alone.for_member(member).relays for member in alone.members)


def test_the_members_of_a_node_relay_alike() -> None:
    """One node trains, and three others come: each of their members receives an eighth, and gives it to the others."""
    before, after = Layout(zero_stage=1, data=8), Layout(zero_stage=1, data=32)
    nodes = {member: f"node-{member // 8}" for member in range(32)}
    plan = plan_switch(layers(before), after, range(32), WEIGHT, nodes=nodes)
    for member in range(8, 32):
        part = plan.for_member(member)
        crossed, sent = (
            sum(getattr(each, end).nbytes for each in phase)
            for phase, end in ((part.rounds, "receives"), (part.relays, "sends"))
        )
        whole = crossed + sum(each.receives.nbytes for each in part.relays)
        assert {nodes[each.peer] for each in part.relays} == {nodes[member]}
        assert np.isclose(crossed, whole / 8, rtol=0.05) and sent == 7 * crossed
