"""Plans for the tensor and expert axes against DeepSpeed's own planner of parameter moves: the same copies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import (
    AxisCuts,
    DimCut,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
    uneven,
)
from tests.plan.simulate import each

affine = pytest.importorskip("deepspeed.checkpoint.affine", reason="this DeepSpeed has no map of shards")
affine_transfer = pytest.importorskip("deepspeed.checkpoint.affine_transfer", reason="this DeepSpeed plans no moves")

Copied = list[tuple[int, int, int, int]]
"""For each element: the source rank, its address there, the target rank, its address there."""


@st.composite
def sizes(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """Parts of a dim, none of them empty."""
    count = draw(st.integers(1, min(4, total)))
    inside = st.integers(1, max(1, total - 1))
    ends = sorted(draw(st.lists(inside, min_size=count - 1, max_size=count - 1, unique=True)))
    return tuple(high - low for low, high in itertools.pairwise([0, *ends, total]))


@st.composite
def changes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]:
    """A shape, the dim that is cut, and its parts before and after; those of one number of ranks are alike."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    before, after = draw(sizes(shape[dim])), draw(sizes(shape[dim]))
    return shape, dim, before, before if len(before) == len(after) else after


def ours(tensor: LogicalTensor, axis: str, before: DimCut, after: DimCut) -> Copied:
    """All elements of the weight that the members copy, from each other and within themselves, without ZeRO."""
    source, target = (_layout(axis, cut.count) for cut in (before, after))

    def partition(layout: Layout) -> Partition:
        return (AxisCuts(**{axis: before if layout == source else after}),)

    most = max(source.world_size, target.world_size)
    vps = VirtualParameterSpace.of(
        [tensor], ZeroRules(), standard_kinds(4, moments=()), source, range(source.world_size), partition
    )
    plan, found = plan_switch(vps, target, range(target.world_size), ["weight"]), list[tuple[int, int, int, int]]()
    for member in range(most):
        mine = plan.for_member(member)
        for moves in (mine.local, *(exchange.receives for exchange in mine.rounds)):
            for run in each(moves):
                for at in range(run.stop - run.start):
                    found.append((run.source, run.source_offset + at, run.target, run.target_offset + at))
    return sorted(found)


def _layout(axis: str, count: int) -> Layout:
    """A layout in which each rank has an index of its own on the axis."""
    sizes = {"tensor": count} if axis == "tensor" else {"data": count, "expert": count}
    return Layout(zero_stage=0, **sizes)


def theirs(before: Any, after: Any) -> Copied:
    """All elements of the segments that DeepSpeed plans."""
    found = list[tuple[int, int, int, int]]()
    for segment in affine_transfer.plan_transfer(after, before).segments:
        for index in itertools.product(*map(range, segment.shape)):
            read = sum(map(int.__mul__, index, segment.source_strides))
            written = sum(map(int.__mul__, index, segment.target_strides))
            found.append(
                (
                    segment.source_rank,
                    segment.source_offset + read,
                    segment.target_rank,
                    segment.target_offset + written,
                )
            )
    return sorted(found)


@settings(deadline=None, max_examples=80)
@given(changes())
def test_the_tensor_axis(change: tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]) -> None:
    shape, dim, *parts = change
    before, after = (affine.contiguous_split_map(shape, each, dim) for each in parts)
    assert ours(LogicalTensor("t", shape), "tensor", *(uneven(dim, each) for each in parts)) == theirs(before, after)


@settings(deadline=None, max_examples=40)
@given(changes())
def test_the_expert_axis(change: tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]) -> None:
    shape, dim, *parts = change
    before, after = (affine.contiguous_split_map(shape, each, dim) for each in parts)
    tensor = LogicalTensor("t", shape, expert=True)
    assert ours(tensor, "expert", *(uneven(dim, each) for each in parts)) == theirs(before, after)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_fused_parameters(data: st.DataObject) -> None:
    """Query, key and value in one matrix, each cut into parts."""
    blocks, width, dim = data.draw(st.lists(st.integers(4, 7), min_size=2, max_size=3)), 3, data.draw(st.integers(0, 1))
    shape = (sum(blocks), width) if dim == 0 else (width, sum(blocks))
    both, maps = list[DimCut](), []
    for _ in range(2):
        count = data.draw(st.integers(1, 4))
        parts = tuple(tuple(size // count + (index < size % count) for index in range(count)) for size in blocks)
        both.append(DimCut(dim, parts))
        maps.append(affine.sub_param_map(shape, blocks, parts, dim))
    assert ours(LogicalTensor("t", shape), "tensor", *both) == theirs(*maps)
