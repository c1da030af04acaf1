"""Slots against all assignments there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan import assign_slots, picture_of, plan_switch
from ds_dynatrain.plan.kept_bytes import Classes, KeptBytes
from ds_dynatrain.plan.matching import Prices, match, most_kept
from ds_dynatrain.plan.placement import place_slots
from ds_dynatrain.space import FROZEN, Layout, LogicalTensor, ZeroRules
from tests.plan.dense import fewest_bytes, received, slot_costs, table_of
from tests.plan.simulate import lacking_bytes
from tests.plan.test_senders import SIZES, layers
from tests.sets import examples, one_in
from tests.space.models import layouts, space, tensor_lists, weight_sizes, zero_rules
from tools.minimum import bytes_minimum, bytes_sent

TENSORS = [
    LogicalTensor("a", (7, 5)),
    LogicalTensor("b", (7,)),
    LogicalTensor("c", (11,), 1),
    LogicalTensor("f", (5,), FROZEN),
]
RULES = ZeroRules(sub_group_size=12)
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")


@settings(deadline=None, max_examples=examples(120))
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
    assert received(vps, target, order, KINDS).tolist() == slot_costs(vps, target, order, KINDS).tolist()
    found = assign_slots(vps, target, candidates, kinds=KINDS)
    members = found.members
    allowed = [choice for choice in itertools.permutations(order, target.data) if 0 not in candidates or choice[0] == 0]
    least = min(sum(cost[member, slot] for slot, member in enumerate(choice)) for choice in allowed)
    assert sum(cost[member, slot] for slot, member in enumerate(members)) == least
    assert members in allowed
    assert bytes_sent(plan_switch(vps, target, members, KINDS)) == least == found.bytes_moved == found.bytes_bound
    every = itertools.permutations(order, target.data)
    free = min(sum(cost[member, slot] for slot, member in enumerate(choice)) for choice in every)
    assert found.rank_zero_bytes == least - free


@pytest.mark.parametrize("source", one_in(3, SIZES), ids=str)
def test_layers_that_are_cut_alike_count_each(source: dict[str, int]) -> None:
    """At stage 3, the table looks at one of them."""
    before = Layout(zero_stage=3, **source)
    for stage, target in itertools.product((1, 3), SIZES):
        after = Layout(zero_stage=stage, **target)
        candidates = range(before.world_size + 1)
        dense = slot_costs(layers(before), after, candidates, KINDS)
        assert received(layers(before), after, candidates, KINDS).tolist() == dense.tolist()


def test_usual_rank_order_moves_half_as_much_again() -> None:
    vps = space([LogicalTensor("a", (64, 64))], ZeroRules(), Layout(zero_stage=3, data=2), (0, 1))
    target = Layout(zero_stage=3, data=4)
    members = assign_slots(vps, target, range(4), kinds=KINDS).members
    whole = 64 * 64 * 12
    assert members == (0, 2, 1, 3)
    assert bytes_sent(plan_switch(vps, target, members, ("master", "exp_avg", "exp_avg_sq"))) == whole * 50 // 100
    assert bytes_sent(plan_switch(vps, target, range(4), ("master", "exp_avg", "exp_avg_sq"))) == whole * 75 // 100


def test_ties_go_to_working_members_then_to_their_nodes() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=0, data=3), (4, 2, 6))
    assert assign_slots(vps, Layout(zero_stage=0, data=2), range(8)).members == (4, 2)
    assert assign_slots(vps, Layout(zero_stage=0, data=3), range(8)).members == (4, 2, 6)
    assert assign_slots(vps, Layout(zero_stage=0, data=4), range(8)).members == (4, 2, 6, 0)
    nodes = {member: "near" if member in (4, 2, 6, 7) else "far" for member in range(8)}
    assert assign_slots(vps, Layout(zero_stage=0, data=5), range(8), nodes).members == (4, 2, 6, 7, 0)


@pytest.mark.parametrize("stage", one_in(3, range(4)))
def test_the_order_in_which_candidates_are_named_does_not_matter(stage: int) -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=stage, data=3), (5, 1, 3))
    target = Layout(zero_stage=stage, data=4)
    assert len({assign_slots(vps, target, order) for order in itertools.permutations((1, 3, 5, 7, 8))}) == 1


def test_rank_zero_leaves_with_its_member() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=1, data=3), (0, 1, 2))
    members = assign_slots(vps, Layout(zero_stage=1, data=2), (1, 2)).members
    assert members == (1, 2)
    assert bytes_sent(plan_switch(vps, Layout(zero_stage=1, data=2), members)) == bytes_minimum(
        vps, Layout(zero_stage=1, data=2), members
    )


def test_too_few_candidates() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=1, data=2), (0, 1))
    with pytest.raises(LayoutError, match="4 ranks and only 3 members"):
        assign_slots(vps, Layout(zero_stage=1, data=4), (0, 1, 2))


@st.composite
def tables(draw: st.DrawFn, *tops: int) -> KeptBytes:
    """A table of up to 9 ranks and 9 slots in few classes, with some pairs that keep more.

    tops: a number below which all entries lie, one of these; by default some that floats represent exactly.
    """
    ranks, slots = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    classes = [np.sort(np.unique(rng.integers(0, 3, size), return_inverse=True)[1]) for size in (ranks, slots)]
    firsts = [np.unique(each, return_index=True)[1] for each in classes]
    top = draw(st.sampled_from(tops or (2, 5, 10**12)))
    by_class = rng.integers(0, top, (len(firsts[0]), len(firsts[1])))
    rank, slot = np.nonzero(rng.random((ranks, slots)) < draw(st.sampled_from([0.1, 0.4])))
    more = rng.integers(1, top, len(rank))
    return KeptBytes(
        Classes(classes[0], firsts[0]),
        Classes(classes[1], firsts[1]),
        csr_array(by_class),
        rank,
        slot,
        by_class[classes[0][rank], classes[1][slot]] + more,
        np.full(slots, 3 * top),
        (np.zeros(ranks, np.int64), np.zeros(slots, np.int64)),
    )


@settings(deadline=None, max_examples=examples(150))
@given(tables())
def test_a_matching_keeps_the_most_and_its_prices_prove_it(kept: KeptBytes) -> None:
    table = table_of(kept)
    ranks, slots = (np.ones(size, bool) for size in table.shape)
    found = match(kept, ranks, slots)
    rows, columns = linear_sum_assignment(-table)
    most = int(table[rows, columns].sum())
    assert sorted(found.rank_of[found.rank_of >= 0].tolist()) == sorted(set(found.rank_of[found.rank_of >= 0].tolist()))
    assert (found.rank_of >= 0).sum() == min(table.shape)
    assert kept.nbytes_of(found.rank_of) == most == most_kept(kept, found.prices, ranks, slots)


@settings(deadline=None, max_examples=examples(300))
@given(tables(1 << 58))
def test_numbers_beyond_floats_still_give_a_matching_and_a_bound(kept: KeptBytes) -> None:
    ranks, slots = np.ones(len(kept.ranks.of), bool), np.ones(len(kept.slots.of), bool)
    found = match(kept, ranks, slots)
    taken = found.rank_of[found.rank_of >= 0]
    assert len({*taken.tolist()}) == len(taken) == min(len(ranks), len(slots))
    table = table_of(kept)
    assert sum(table[rank, slot] for slot, rank in enumerate(found.rank_of) if rank >= 0) <= most_kept(
        kept, found.prices, ranks, slots
    )


@settings(deadline=None, max_examples=examples(100))
@given(tables(), st.integers(1, 3), st.integers(0, 17))
def test_wrong_prices_are_refused(kept: KeptBytes, less: int, at: int) -> None:
    ranks, slots = np.ones(len(kept.ranks.of), bool), np.ones(len(kept.slots.of), bool)
    found = match(kept, ranks, slots)
    prices = Prices(found.prices.rank.copy(), found.prices.slot.copy())
    part = (prices.rank, prices.slot)[at % 2]
    part[at // 2 % len(part)] -= less
    with pytest.raises(LayoutError, match=r"prices are \d+ bytes too low"):
        most_kept(kept, prices, ranks, slots)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(zero_stage=stage, data=data), Layout(zero_stage=goal, data=other))
        for data, other in ((256, 250), (200, 256), (96, 256))
        for stage, goal in ((1, 1), (1, 3), (3, 2))
    ]
    + [(Layout(zero_stage=1, data=1024), Layout(zero_stage=1, data=1000))],
)
def test_as_few_bytes_as_the_dense_method(source: Layout, target: Layout) -> None:
    tensors = [LogicalTensor("a", (509, 97)), LogicalTensor("b", (1021,)), LogicalTensor("c", (83, 83), 1)]
    vps = space(tensors, RULES, source, tuple(range(source.data)))
    candidates = range(max(source.data, target.data))
    found = assign_slots(vps, target, candidates, kinds=KINDS)
    assert found.bytes_moved == fewest_bytes(slot_costs(vps, target, candidates, KINDS), rank_zero_stays=True)
    assert found.bytes_moved == found.bytes_bound


def test_released_members_empty_whole_nodes() -> None:
    vps = space([LogicalTensor("a", (512, 64))], RULES, Layout(zero_stage=1, data=64), tuple(range(64)))
    target, nodes = Layout(zero_stage=1, data=32), {member: f"node {member // 8}" for member in range(64)}
    found, free = assign_slots(vps, target, range(64), nodes), assign_slots(vps, target, range(64))
    assert len({nodes[member] for member in found.members}) == 4
    assert len({nodes[member] for member in free.members}) == 8
    assert found.members[0] == 0
    assert found.bytes_moved == found.bytes_bound == free.bytes_moved + found.placement_bytes
    assert assign_slots(vps, target, reversed(range(64)), dict(reversed(nodes.items()))) == found
    assert assign_slots(vps, target, range(64), dict.fromkeys(nodes, "one")) == free


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=9),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 1), (4, 8), (1, 6), (1, 12), (3, 1)]),
    st.booleans(),
    st.data(),
)
def test_groups_lie_on_few_nodes(
    capacity: list[int], groups: tuple[int, int], has_first: bool, data: st.DataObject
) -> None:
    tensor, expert = groups
    block = max(tensor, expert)
    if sum(capacity) < block:
        return
    blocks = data.draw(st.integers(1, sum(capacity) // block))
    layout = Layout(zero_stage=1, tensor=tensor, expert=expert, data=block // tensor * blocks)
    ranks, slots = sum(capacity), layout.world_size
    one = Classes(np.zeros(ranks, np.int64), np.zeros(1, np.int64))
    other = Classes(np.zeros(slots, np.int64), np.zeros(1, np.int64))
    nothing, table = np.empty(0, np.int64), csr_array((1, 1), dtype=np.int64)
    zones = np.zeros(ranks, np.int64), np.zeros(slots, np.int64)
    kept = KeptBytes(one, other, table, nothing, nothing, nothing, np.zeros(slots, np.int64), zones)
    node_of_rank = np.repeat(np.arange(len(capacity)), capacity)
    zone_of_slot, zone_of_node = place_slots(layout, capacity, capacity, has_first, kept, node_of_rank)
    if block == 1:
        used = [size for size, zone in zip(capacity, zone_of_node, strict=True) if zone == 0]
        assert sum(used) >= slots and (sum(used) - min(used) < slots or has_first)
        return
    filled, room = np.bincount(zone_of_slot, minlength=ranks), np.bincount(zone_of_node, capacity, ranks)
    assert (filled <= room).all()
    assert not has_first or zone_of_slot[0] == 0
    if sum(size // tensor for size in capacity) * tensor >= slots and (capacity[0] >= tensor or not has_first):
        assert all(len(set(each)) == 1 for each in zone_of_slot.reshape(-1, tensor).tolist())
    if len(set(capacity)) == 1 and capacity[0] % tensor == 0:
        fewest = -(-block // capacity[0])
        assert all(np.isin(zone_of_node, each).sum() <= fewest for each in zone_of_slot.reshape(-1, block))


@settings(deadline=None, max_examples=examples(60))
@given(layouts, layouts, st.lists(st.sampled_from("abc"), min_size=6, max_size=6), st.permutations(range(6)))
def test_members_on_nodes_move_what_is_proved(
    source: Layout, target: Layout, names: list[str], order: list[int]
) -> None:
    vps = space(TENSORS, RULES, source, tuple(order[: source.data]))
    nodes = dict(zip(range(6), names, strict=True))
    found = assign_slots(vps, target, range(6), nodes, kinds=KINDS)
    free = assign_slots(vps, target, range(6), kinds=KINDS)
    assert len({*found.members}) == target.data and found.members[0] == order[0]
    assert bytes_sent(plan_switch(vps, target, found.members, KINDS)) == found.bytes_moved == found.bytes_bound
    assert found.bytes_moved == free.bytes_moved + found.placement_bytes


@settings(deadline=None, max_examples=examples(60))
@given(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.integers(1, 4), st.integers(2, 5), st.data())
def test_ties_go_to_members_whose_nodes_hold_the_bytes(
    stage: int, goal: int, ranks: int, slots: int, data: st.DataObject
) -> None:
    """No other idle members of these nodes, and no other order of them, send fewer bytes between nodes."""
    count = max(ranks, slots) + 1
    nodes = dict(enumerate(data.draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))))
    source, target = Layout(zero_stage=stage, data=ranks), Layout(zero_stage=goal, data=slots)
    vps = space([LogicalTensor("a", (64, 6))], RULES, source, tuple(range(ranks)))
    found = assign_slots(vps, target, range(count), nodes, kinds=KINDS[1:])
    used = {nodes[member] for member in found.members}
    costs = received(vps, target, range(count), KINDS[1:])

    def between(members: tuple[int, ...]) -> int:
        plan = plan_switch(vps, target, members, KINDS[1:], nodes=nodes)
        numbers = [ord(nodes[member]) - ord("a") for member in plan.members]
        return int(picture_of(plan, np.array(numbers)).sent[1].sum())

    others = (
        members
        for members in itertools.permutations(range(count), slots)
        if all(each == other or min(each, other) >= ranks for each, other in zip(members, found.members, strict=True))
        and {nodes[member] for member in members} <= used
        and sum(int(costs[member, slot]) for slot, member in enumerate(members)) == found.bytes_moved
    )
    assert between(found.members) == min(map(between, others))
