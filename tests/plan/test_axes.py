"""Plans between layouts of all axes, played out element by element against tensors that numpy has split."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan import assign_slots, bytes_sent, plan_switch
from ds_dynatrain.space import (
    FROZEN,
    WHOLE,
    AxisCuts,
    Layout,
    LogicalTensor,
    Partition,
    Pick,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
    uneven,
)
from tests.plan.dense import received
from tests.plan.simulate import each, play, stays
from tests.sets import one_in
from tests.space.expected import buffers_under, equal, laid_out
from tests.space.laid import checked
from tests.space.models import even, fused
from tools.minimum import bytes_minimum

TENSORS = [
    LogicalTensor("embed", (10, 4)),
    LogicalTensor("norm", (5,)),
    LogicalTensor("qkv", (24, 3)),
    LogicalTensor("row", (3, 12)),
    LogicalTensor("bias", (12,), 1),
    LogicalTensor("last", (3, 4), 1),
    LogicalTensor("experts.w1", (4, 3, 2), 2, expert=True),
    LogicalTensor("experts.w2", (4, 5), 2, expert=True),
    LogicalTensor("alone", (3, 3), 2, expert=True),
    LogicalTensor("frozen", (6, 2), FROZEN),
]
RULES = ZeroRules()


def shares(size: int, count: int) -> tuple[int, ...]:
    """As even as possible."""
    return tuple(size // count + (index < size % count) for index in range(count))


def partition(layout: Layout) -> Partition:
    """Column, row, fused and vocabulary cuts, even or not; a tied tensor on the first and the last stage."""
    tensor, pipe, experts = layout.tensor, layout.pipe, layout.expert
    last = pipe - 1
    cuts = {
        "embed": AxisCuts(tuple(sorted({0, last})), tensor=uneven(0, shares(10, tensor))),
        "norm": AxisCuts((0,)),
        "qkv": AxisCuts((0,), tensor=fused(0, [8, 8, 8], tensor) if tensor in (1, 2, 4) else uneven(0, (9, 9, 6))),
        "row": AxisCuts((last,), tensor=uneven(1, shares(12, tensor))),
        "bias": AxisCuts((last,), tensor=uneven(0, shares(12, tensor))),
        "last": AxisCuts((last,)),
        "experts.w1": AxisCuts((last,), expert=even(0, 4, experts)),
        "experts.w2": AxisCuts((last,), expert=even(0, 4, experts)),
        "alone": AxisCuts((0,), expert=Pick(experts, (experts - 1,))),
        "frozen": AxisCuts((0,), tensor=uneven(0, shares(6, tensor))),
    }
    return tuple(cuts[held.name] for held in TENSORS)


SIZES = [
    {"data": 1},
    {"data": 3},
    {"data": 2, "tensor": 2},
    {"tensor": 3},
    {"tensor": 4},
    {"pipe": 2},
    {"pipe": 2, "data": 2},
    {"pipe": 4},
    {"data": 4, "expert": 2},
    {"data": 4, "expert": 4},
    {"data": 2, "sequence": 2, "expert": 2},
    {"data": 2, "sequence": 2},
    {"pipe": 2, "tensor": 2, "data": 2, "expert": 2},
    {"tensor": 2, "data": 2, "expert": 4},
    {"tensor": 4, "expert": 2},
    {"tensor": 3, "data": 2, "expert": 2},
]
LAYOUTS = [Layout(zero_stage=stage, **sizes) for sizes in SIZES for stage in range(4)]


def space(layout: Layout, members: tuple[int, ...], weight: int = 2) -> VirtualParameterSpace:
    kinds = standard_kinds(weight, stale_grad=weight)
    return VirtualParameterSpace.of(TENSORS, RULES, kinds, layout, members, partitioner=partition)


def kinds_of(source: Layout, target: Layout) -> tuple[str, ...]:
    stale = ("stale_grad",) if source.zero_stage == target.zero_stage == 3 else ()
    return ("weight", "master", "exp_avg", "exp_avg_sq", *stale)


def check(source: Layout, target: Layout, weight: int, seed: int) -> None:
    """Complete, each element once, sends equal receives, and no byte that its receiver had."""
    vps = space(source, tuple(range(source.world_size)), weight)
    members = tuple(random.Random(seed).sample(range(9), target.world_size))
    kinds = kinds_of(source, target)
    assert play(plan_switch(vps, target, members, kinds)) == bytes_minimum(vps, target, members, kinds)


@pytest.mark.parametrize(
    "source",
    one_in(4, SIZES),
    ids=str,
)
def test_pairs_of_layouts(source: dict[str, int]) -> None:
    for number, sizes in enumerate(SIZES):
        stages = (number % 4, (number + len(source)) % 4)
        check(Layout(zero_stage=stages[0], **source), Layout(zero_stage=stages[1], **sizes), (2, 4)[number % 2], number)


@pytest.mark.full
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_pair_of_layouts(source: Layout) -> None:
    for number, target in enumerate(LAYOUTS):
        check(source, target, (2, 4)[number % 2], number)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces_are_owned_once_and_held_where_numpy_says(layout: Layout) -> None:
    vps = space(layout, tuple(range(layout.world_size)))
    for kind in vps.present_kinds(layout):
        owned: list[int] = []
        for rank in range(layout.world_size):
            pieces = checked(vps.holding(layout, rank, kind))
            assert equal(laid_out(pieces), buffers_under(vps, layout, rank, kind))
            held = {step for piece in pieces for step in range(piece.start, piece.stop)}
            mine = [step for piece in vps.owned(layout, rank, kind) for step in range(piece.start, piece.stop)]
            assert held.issuperset(mine)
            owned += mine
        trainable = [number for number, held in enumerate(TENSORS) if held.trainable or kind == "weight"]
        assert sorted(owned) == sorted(
            step for number in trainable for step in range(int(vps.bases[number]), int(vps.bases[number + 1]))
        )


@pytest.mark.parametrize("layout", one_in(5, LAYOUTS), ids=str)
def test_the_same_layout_moves_nothing(layout: Layout) -> None:
    vps = space(layout, tuple(range(layout.world_size)))
    plan = plan_switch(vps, layout, vps.members)
    assert bytes_sent(plan) == 0
    for member in plan.members:
        part = plan.for_member(member)
        assert len(part.derived) == 0 and all(map(stays, each(part.local)))


SMALL = [layout for layout in LAYOUTS[::5] if layout.world_size <= 4]


@pytest.mark.parametrize("source", one_in(3, SMALL), ids=str)
def test_slots_move_the_fewest_bytes(source: Layout) -> None:
    for target in SMALL:
        if target == source:
            continue
        vps = space(source, tuple(range(source.world_size)))
        kinds = kinds_of(source, target)
        members = assign_slots(vps, target, range(4), kinds=kinds).members
        costs = received(vps, target, range(4), kinds)
        chosen = sum(int(costs[member, slot]) for slot, member in enumerate(members))
        others = itertools.permutations(range(1, 4), target.world_size - 1)
        least = min(sum(int(costs[m, s]) for s, m in enumerate((0, *rest))) for rest in others)
        assert chosen == least == bytes_sent(plan_switch(vps, target, members, kinds))


def test_refusals() -> None:
    plain = VirtualParameterSpace.of(TENSORS, RULES, standard_kinds(2), Layout(zero_stage=1), (0,))
    with pytest.raises(LayoutError, match=r"tensor=2 .*: this model is dealt out by data and sequence only"):
        plan_switch(plain, Layout(zero_stage=1, tensor=2), (0, 1)).for_member(0)
    two = (AxisCuts(tensor=even(0, 10, 2)), *(WHOLE,) * (len(TENSORS) - 1))
    odd = VirtualParameterSpace.of(
        TENSORS, RULES, standard_kinds(2), Layout(zero_stage=1), (0,), partitioner=lambda _: two
    )
    with pytest.raises(LayoutError, match=r"'embed' is dealt out in 2 by the tensor axis, and .*tensor=3.* has 3"):
        odd.mesh(Layout(zero_stage=1, tensor=3))
    cuts = {held.name: AxisCuts(tensor=even(1, 2, 2)) if held.name == "experts.w1" else WHOLE for held in TENSORS}
    both = VirtualParameterSpace.of(
        TENSORS, RULES, standard_kinds(2), Layout(zero_stage=1), (0,), partitioner=lambda _: tuple(cuts.values())
    )
    with pytest.raises(LayoutError, match=r"'experts\.w1' belongs to experts and is cut by the tensor axis, too"):
        both.mesh(Layout(zero_stage=1, tensor=2))
