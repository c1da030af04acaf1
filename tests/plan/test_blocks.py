"""Blocks against elements: plans between any two layouts, played out where numpy's splitting puts each element."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import (
    FROZEN,
    AxisCuts,
    DimCut,
    Layout,
    LogicalTensor,
    Partition,
    Partitioner,
    Pick,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)
from tests.plan.simulate import play
from tests.sets import examples
from tests.space.models import zero_rules
from tools.minimum import bytes_minimum

SIZES: list[dict[str, int]] = [
    {},
    {"data": 3},
    {"tensor": 2},
    {"tensor": 3, "data": 2},
    {"tensor": 4},
    {"pipe": 2, "tensor": 2},
    {"pipe": 3},
    {"data": 2, "tensor": 2, "expert": 2},
    {"data": 4, "expert": 4},
    {"data": 2, "sequence": 2, "expert": 2},
    {"pipe": 2, "tensor": 2, "data": 2, "expert": 2},
    {"tensor": 4, "expert": 2},
]
LARGE: list[dict[str, int]] = [
    {"tensor": 8, "data": 8},
    {"tensor": 4, "data": 4, "pipe": 4, "expert": 4},
    {"data": 64, "expert": 8},
    {"tensor": 16, "data": 2, "expert": 4},
]


@st.composite
def models(draw: st.DrawFn) -> list[LogicalTensor]:
    """Tensors of one to three dims in two optimizer groups, experts in a third, and frozen ones."""
    found = [LogicalTensor("t0", (5, 6))]
    for group, expert, most in ((0, False, 4), (1, False, 2), (2, True, 2), (FROZEN, False, 2)):
        for _ in range(draw(st.integers(0, most))):
            shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
            found.append(LogicalTensor(f"t{len(found)}", shape, group, expert))
    return found


def dealt(tensors: Sequence[LogicalTensor], seed: int) -> Partitioner:
    """Any cuts, which depend on nothing but the seed and the axis sizes: uneven, fused, tied, stacked or alone."""

    def partition(layout: Layout) -> Partition:
        found = list[AxisCuts]()
        for number, tensor in enumerate(tensors):
            chance = random.Random(f"{seed} {number}")
            dim, fused, tied, alone, is_cut = (chance.randrange(each) for each in (len(tensor.shape), 2, 3, 2, 4))
            first = chance.randrange(1 << 16) % layout.pipe
            stages = tuple(sorted({first, layout.pipe - 1} if tied == 0 else {first}))
            chance = random.Random(f"{seed} {number} {layout.tensor} {layout.expert}")
            if tensor.expert:
                cut = DimCut(0, (shares(chance, tensor.shape[0], layout.expert),))
                holders = tuple(sorted({chance.randrange(layout.expert) for _ in range(2)}))
                found.append(AxisCuts(stages, expert=Pick(layout.expert, holders) if alone else cut))
            elif is_cut:
                size = tensor.shape[dim]
                blocks = (size // 2, size - size // 2) if fused else (size,)
                parts = tuple(shares(chance, each, layout.tensor) for each in blocks)
                found.append(AxisCuts(stages, tensor=DimCut(dim, parts)))
            else:
                found.append(AxisCuts(stages))
        return tuple(found)

    return partition


def shares(chance: random.Random, size: int, count: int) -> tuple[int, ...]:
    """As even as possible, or any sizes, which may be 0."""
    if chance.random() < 0.5:
        return tuple(size // count + (index < size % count) for index in range(count))
    ends = [0, *sorted(chance.randint(0, size) for _ in range(count - 1)), size]
    return tuple(high - low for low, high in itertools.pairwise(ends))


def check(
    tensors: list[LogicalTensor], rules: ZeroRules, source: Layout, target: Layout, weight: int, seed: int
) -> None:
    vps = VirtualParameterSpace.of(
        tensors,
        rules,
        standard_kinds(weight, stale_grad=weight),
        source,
        range(source.world_size),
        dealt(tensors, seed),
    )
    members = tuple(random.Random(seed).sample(range(max(source.world_size, target.world_size) + 2), target.world_size))
    kinds = ("weight", "master", "exp_avg", *(("stale_grad",) if source.zero_stage == target.zero_stage == 3 else ()))
    assert play(plan_switch(vps, target, members, kinds)) == bytes_minimum(vps, target, members, kinds)


def layouts(sizes: list[dict[str, int]]) -> st.SearchStrategy[Layout]:
    return st.builds(lambda stage, each: Layout(zero_stage=stage, **each), st.integers(0, 3), st.sampled_from(sizes))


@settings(deadline=None, max_examples=examples(60))
@given(
    models().filter(bool), zero_rules, layouts(SIZES), layouts(SIZES), st.sampled_from([2, 4]), st.integers(0, 1 << 16)
)
def test_any_two_layouts(
    tensors: list[LogicalTensor], rules: ZeroRules, source: Layout, target: Layout, weight: int, seed: int
) -> None:
    rules = ZeroRules() if 3 in (source.zero_stage, target.zero_stage) else rules  # sub-groups must be alike
    check(tensors, rules, source, target, weight, seed)


@pytest.mark.full
@settings(deadline=None, max_examples=6)
@given(models(), layouts(LARGE), layouts(LARGE), st.integers(0, 1 << 16))
def test_any_two_layouts_of_64_ranks(tensors: list[LogicalTensor], source: Layout, target: Layout, seed: int) -> None:
    check(tensors, ZeroRules(), source, target, 2, seed)
