"""Small models and worlds for tests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ds_dynatrain.space import (
    FROZEN,
    DimCut,
    Layout,
    LogicalTensor,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)


def fused(dim: int, sizes: Sequence[int], count: int) -> DimCut:
    """Blocks along a dim, each cut evenly: gate-and-up; query, key and value."""
    return DimCut(dim, tuple((size // count,) * count for size in sizes))


def even(dim: int, size: int, count: int) -> DimCut:
    """A dim cut evenly."""
    return fused(dim, [size], count)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[LogicalTensor]:
    """Two groups and frozen tensors of odd sizes, some empty; perhaps no tensor at all."""
    counts = (draw(st.integers(0, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 2)))
    found: list[LogicalTensor] = []
    for group, count in zip((0, 1, FROZEN), counts, strict=True):
        for _ in range(count):
            shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
            found.append(LogicalTensor(f"t{len(found)}", shape, group))
    return found


zero_rules = st.builds(
    ZeroRules,
    sub_group_size=st.integers(1, 20),
    round_robin_stages=st.sets(st.sampled_from([1, 2])).map(frozenset),
    aligned_stages=st.sets(st.sampled_from([1, 2])).map(frozenset),
    weight_alignment=st.sampled_from([1, 4, 8]),
)
layouts = st.builds(Layout, zero_stage=st.integers(0, 3), data=st.integers(1, 4))
weight_sizes = st.sampled_from([4, 2])


def space(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout, members: tuple[int, ...], weight: int = 2
) -> VirtualParameterSpace:
    return VirtualParameterSpace.of(tensors, rules, standard_kinds(weight, stale_grad=weight), layout, members)
