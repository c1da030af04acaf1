"""Maps of experts: a switch to another one moves the experts that change their index, and nothing else."""

from __future__ import annotations

import random
from itertools import chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import (
    FROZEN,
    AxisCuts,
    Dealt,
    ExpertMap,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
    uneven,
)
from tests.plan.simulate import play
from tests.space.expected import buffers_under, equal, laid_out
from tests.space.laid import checked
from tools.minimum import bytes_minimum

EXPERTS = (8, 4)
"""Experts of the two layers."""
SHAPES = ((3, 2), (5,))
TENSORS = [
    LogicalTensor("first", (7, 3)),
    LogicalTensor("last", (5,)),
    *(
        LogicalTensor(f"{layer}.w{number}", (count, *SHAPES[number]), 1, expert=True)
        for layer, count in enumerate(EXPERTS)
        for number in range(2)
    ),
    LogicalTensor("frozen", (8, 2), FROZEN, expert=True),
]
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")


def rows(layout: Layout, layer: int) -> Dealt:
    """The experts of each index, by the map or in order."""
    each = EXPERTS[layer] // layout.expert
    in_order = tuple(tuple(range(index * each, (index + 1) * each)) for index in range(layout.expert))
    return Dealt(in_order if layout.experts is None else layout.experts[layer])


def partition(layout: Layout) -> Partition:
    """Layer 0 is on the first stage, layer 1 on the last."""
    last = layout.pipe - 1
    cuts = {
        "first": AxisCuts((0,)),
        "last": AxisCuts((last,)),
        "frozen": AxisCuts((last,), expert=rows(layout, 0)),
        **{
            f"{layer}.w{number}": AxisCuts((layer and last,), expert=rows(layout, layer))
            for layer, number in product(range(2), range(2))
        },
    }
    return tuple(cuts[held.name] for held in TENSORS)


def space(layout: Layout) -> VirtualParameterSpace:
    """The model under a layout."""
    members = tuple(range(layout.world_size))
    return VirtualParameterSpace.of(TENSORS, ZeroRules(), standard_kinds(2), layout, members, partition)


@st.composite
def maps(draw: st.DrawFn, size: int) -> ExpertMap:
    """Any map."""
    orders = [draw(st.permutations(range(count))) for count in EXPERTS]
    each = [count // size for count in EXPERTS]
    return tuple(
        tuple(tuple(order[index * width : (index + 1) * width]) for index in range(size))
        for order, width in zip(orders, each, strict=True)
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Sizes and a map."""
    size, stage = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 3))
    pipe = draw(st.sampled_from([1, 2])) if stage < 2 else 1
    found = draw(maps(size)) if size > 1 else None
    return Layout(data=size * draw(st.integers(1, 2)), pipe=pipe, expert=size, zero_stage=stage, experts=found)


@settings(deadline=None, max_examples=12)
@given(layouts(), st.data())
def test_pieces_are_where_numpy_says(layout: Layout, data: st.DataObject) -> None:
    vps, owned = space(layout), list[int]()
    kind = data.draw(st.sampled_from(vps.present_kinds(layout)))
    for rank in range(layout.world_size):
        pieces = checked(vps.holding(layout, rank, kind))
        assert equal(laid_out(pieces), buffers_under(vps, layout, rank, kind))
        owned += [at for piece in vps.owned(layout, rank, kind) for at in range(piece.start, piece.stop)]
    assert len(owned) == len(set(owned))


@settings(deadline=None, max_examples=12)
@given(layouts(), layouts(), st.integers(0, 99))
def test_switches_move_the_fewest_bytes(source: Layout, target: Layout, seed: int) -> None:
    vps = space(source)
    members = tuple(random.Random(seed).sample(range(17), target.world_size))
    plan = plan_switch(vps, target, members, KINDS)
    assert play(plan) == bytes_minimum(vps, target, members, KINDS)


@settings(deadline=None, max_examples=12)
@given(st.data(), st.integers(0, 3), st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2)]))
def test_swapped_experts_move_and_no_others(data: st.DataObject, stage: int, sizes: tuple[int, int]) -> None:
    size, width = sizes
    source = Layout(data=size * width, expert=size, zero_stage=stage, experts=data.draw(maps(size)))
    places = [list(chain(*rows(source, layer).rows)) for layer in range(2)]
    for order in places:  # those who stay keep their places
        width_of = len(order) // size
        spots = data.draw(st.lists(st.integers(0, width_of - 1), unique=True, max_size=2))
        for spot, other in zip(spots, data.draw(st.permutations(range(width_of))), strict=False):
            one, two = spot, len(order) - width_of + other
            order[one], order[two] = order[two], order[one]
    target = source.replace(
        experts=[
            [order[index * len(order) // size : (index + 1) * len(order) // size] for index in range(size)]
            for order in places
        ]
    )
    moved = 0
    for tensor, layer in zip(TENSORS, (0, 0, 0, 0, 1, 1, 0), strict=True):
        if tensor.expert:
            before, after = rows(source, layer).rows, rows(target, layer).rows
            count = sum(len({*after[index]} - {*before[index]}) for index in range(size))
            weights, states = (width if stage < 3 else 1), (1 if stage else width)
            made = states if tensor.trainable else 0  # the weights that a rank casts from masters it gets
            elements = count * tensor.numel // len(list(chain(*before)))
            moved += elements * (2 * (weights - made) + 12 * made)
    vps = space(source)
    plan = plan_switch(vps, target, vps.members, KINDS)
    assert play(plan) == bytes_minimum(vps, target, vps.members, KINDS) == moved


@pytest.mark.parametrize("stage", range(4))
def test_no_map_is_the_cut_in_order(stage: int) -> None:
    layout = Layout(data=4, expert=2, zero_stage=stage)
    vps = space(layout)
    assert all(
        rows(layout, 0).shard((8, 3, 2), index) == uneven(0, (4, 4)).shard((8, 3, 2), index) for index in range(2)
    )
    plan = plan_switch(vps, layout.replace(experts=[[[*range(4)], [*range(4, 8)]], [[0, 1], [2, 3]]]), vps.members)
    assert play(plan) == 0
