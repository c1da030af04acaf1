"""Senders of replicas: those on the receiver's node first, else all in turn; both ends agree."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.plan import SwitchPlan, assign_slots, plan_switch, sides
from ds_dynatrain.space import (
    AxisCuts,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
    uneven,
)
from tests.plan.simulate import each, play
from tests.plan.test_axes import LAYOUTS, kinds_of, space
from tests.sets import examples, one_in
from tools.minimum import busiest_ratio, bytes_minimum

LAYERS, WIDTH = 12, 1024
SIZES = [
    {"data": 2},
    {"data": 6},
    {"data": 3, "tensor": 2},
    {"data": 2, "pipe": 2},
    {"data": 4, "pipe": 2, "boundaries": (0, 6, 12)},
    {"data": 4, "pipe": 2, "boundaries": (0, 7, 12)},
    {"data": 3, "pipe": 4, "tensor": 2},
    {"data": 2, "pipe": 3, "tensor": 4},
    {"data": 5, "pipe": 3},
]


def layers(layout: Layout) -> VirtualParameterSpace:
    """Twelve layers of a matrix cut by rows and one by columns, as large as they are in models."""
    tensors = [LogicalTensor(f"{layer}.{name}", (WIDTH, WIDTH)) for layer in range(LAYERS) for name in ("up", "down")]

    def partition(wanted: Layout) -> Partition:
        borders = wanted.boundaries or tuple(LAYERS * stage // wanted.pipe for stage in range(wanted.pipe + 1))
        parts = [WIDTH // wanted.tensor] * wanted.tensor
        found = []
        for layer in range(LAYERS):
            stage = max(stage for stage in range(wanted.pipe) if borders[stage] <= layer)
            found += [AxisCuts((stage,), tensor=uneven(dim, parts) if wanted.tensor > 1 else None) for dim in (0, 1)]
        return tuple(found)

    kinds = standard_kinds(2)
    return VirtualParameterSpace.of(tensors, ZeroRules(), kinds, layout, range(layout.world_size), partition)


def members_of(target: Layout, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(60), target.world_size))


@pytest.mark.parametrize(
    "source",
    one_in(5, LAYOUTS[::3]),
    ids=str,
)
def test_both_ends_agree_with_nodes_and_short_turns(source: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element arrives once, by the fewest bytes, whatever the nodes of the members are."""
    monkeypatch.setattr(sides, "SMALLEST_SHARE", 1)
    for seed, target in enumerate(LAYOUTS[::5]):
        chance = random.Random(seed)
        vps, kinds = space(source, tuple(range(source.world_size)), (2, 4)[seed % 2]), kinds_of(source, target)
        members = tuple(chance.sample(range(9), target.world_size))
        nodes = {member: chance.choice("abc") for member in range(9) if chance.random() < 0.8}
        plan = plan_switch(vps, target, members, kinds, nodes=nodes)
        assert play(plan) == bytes_minimum(vps, target, members, kinds)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 99))
def test_no_member_sends_much_more_than_one_has_to_receive(
    source: dict[str, int], target: dict[str, int], seed: int
) -> None:
    """Weights at stages 0 to 2 have copies, so all of their senders can be chosen."""
    before, after = Layout(zero_stage=1, **source), Layout(zero_stage=seed % 3, **target)
    plan = plan_switch(layers(before), after, members_of(after, seed), ("weight",))
    sent, received = Counter[int](), Counter[int]()
    for member in plan.members:
        for exchange in plan.for_member(member).exchanges:
            sent[member] += exchange.sends.nbytes
            received[member] += exchange.receives.nbytes
    if sent:
        needed = max(*received.values(), sum(sent.values()) / before.world_size)
        assert max(sent.values()) <= 1.25 * needed


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 9), st.lists(st.integers(0, 6), min_size=60))
def test_no_member_of_a_node_sends_much_more_than_one_has_to(
    source: dict[str, int], target: dict[str, int], idle: int, numbers: list[int]
) -> None:
    """Random nodes. The rule for nodes comes first: a member may have to send a replica to all others of its node.

    It sends its even share of what others of its node need, of what other nodes need, and of what it passes on. Each of
    the three is below what the busiest has to send; mostly, all three together are below 1.25 of it.
    """
    before, after = Layout(zero_stage=1, **source), Layout(zero_stage=idle % 3, **target)
    nodes = {member: f"node-{numbers[member]}" for member in range(60)}
    candidates = range(max(before.world_size, after.world_size) + idle)
    members = assign_slots(layers(before), after, candidates, nodes).members
    assert busiest_ratio(plan_switch(layers(before), after, members, ("weight",), nodes=nodes), nodes) <= 2


@settings(max_examples=examples(25), deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 99))
def test_copies_are_read_on_the_own_node(source: dict[str, int], target: dict[str, int], seed: int) -> None:
    before, after = Layout(zero_stage=1, **source), Layout(zero_stage=1, **target)
    nodes = {member: f"node-{member // 4}" for member in range(60)}
    vps = layers(before)
    plan = plan_switch(vps, after, members_of(after, seed), ("weight",), nodes=nodes)
    check_nodes(vps, plan, nodes)


def check_nodes(vps: VirtualParameterSpace, plan: SwitchPlan, nodes: dict[int, str]) -> None:
    for member in plan.target_members:
        near = [rank for rank, other in enumerate(vps.members) if nodes[other] == nodes[member]]
        held = [vps.holding(vps.layout, rank, "weight") for rank in near]
        for exchange in plan.for_member(member).rounds:
            if nodes[exchange.peer] != nodes[member]:
                for move in each(exchange.receives):
                    for pieces in held:
                        assert not ((pieces.start < move.stop) & (move.start < pieces.stop)).any()
