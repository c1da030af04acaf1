"""Orders of tensors in flat buffers by which few elements change their owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as running
from hypothesis import strategies as st

from ds_dynatrain.plan import assign_slots, nearest
from ds_dynatrain.space import FROZEN, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from ds_dynatrain.space.zero import places_of
from tests.space.models import layouts, space, tensor_lists, weight_sizes, zero_rules


def seven_billion() -> list[LogicalTensor]:
    """The shapes of Llama 7B."""
    shapes = [(32000, 4096)]
    for _ in range(32):
        shapes += [(4096,), (4096,), *[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008)]
    return [LogicalTensor(str(number), shape) for number, shape in enumerate([*shapes, (4096,), (32000, 4096)])]


def a_space(data: int, tensors: list[LogicalTensor]) -> VirtualParameterSpace:
    return space(tensors, ZeroRules(), Layout(zero_stage=2, data=data), tuple(range(data)))


@running(deadline=None, max_examples=40)
@given(
    tensor_lists(),
    zero_rules,
    layouts,
    st.lists(layouts, min_size=1, max_size=2),
    weight_sizes,
    st.sets(st.integers(0, 5), min_size=4, max_size=6),
)
def test_never_more_bytes_and_each_tensor_once(
    tensors: list[LogicalTensor],
    rules: ZeroRules,
    source: Layout,
    path: list[Layout],
    weight: int,
    candidates: set[int],
) -> None:
    """Also from one order into the next, with members that come and go."""
    vps = space(tensors, rules, source, tuple(range(source.data)), weight)
    for target in path:
        found, assigned = nearest(vps, target, candidates)
        assert found.replace(order=None) == target and found == Layout.from_dict(found.to_dict())
        assert assigned == assign_slots(vps, found, candidates)
        assert assigned.bytes_moved <= assign_slots(vps, target, candidates).bytes_moved
        assert nearest(vps, target, sorted(candidates, reverse=True)) == (found, assigned)
        if found.order is not None:
            count = vps.line.trainable_count
            assert found.zero_stage in (1, 2) and sorted(places_of(found.order, count)) == [*range(count)]
        vps = vps.with_layout(found, assigned.members)
        again, still = nearest(vps, target, candidates | set(assigned.members))
        assert again == found and still.bytes_moved == 0 and still.members == assigned.members


@pytest.mark.parametrize(
    ("source", "target", "plain", "ours", "bound"),
    [
        (8, 7, 0.411, 0.131, 1 / 8),
        (4, 3, 0.500, 0.253, 1 / 4),
        (3, 4, 0.333, 0.252, 1 / 4),
        (8, 6, 0.458, 0.256, 1 / 4),
        (16, 15, 0.329, 0.094, 1 / 16),
        (4, 8, 0.500, 0.500, 1 / 2),
    ],
)
def test_near_the_bound(source: int, target: int, plain: float, ours: float, bound: float) -> None:
    """Masters that move in a model of Llama 7B's shapes, where the last ranks leave."""
    vps, members = a_space(source, seven_billion()), range(target)
    layout = Layout(zero_stage=2, data=target)
    found, _ = nearest(vps, layout, members)
    moved = [
        assign_slots(vps, each, members, kinds=["master"]).bytes_moved / (4 * len(vps.line)) for each in (layout, found)
    ]
    assert moved == pytest.approx([plain, ours], abs=5e-4) and moved[1] >= bound


def test_other_stages_and_axes_keep_deepspeeds_order() -> None:
    tensors = [LogicalTensor(str(number), (50 + number, 4)) for number in range(20)]
    vps = a_space(4, tensors)
    three = Layout(zero_stage=2, data=3)
    ordered, assigned = nearest(vps, three, (0, 1, 2))
    assert ordered.order is not None
    vps = vps.with_layout(ordered, assigned.members)
    for stage in (0, 3):
        assert nearest(vps, Layout(zero_stage=stage, data=3), (0, 1, 2))[0].order is None
    plain = VirtualParameterSpace.of(
        tensors, ZeroRules(ordered_stages=frozenset({2})), standard_kinds(2), Layout(zero_stage=2, data=4), range(4)
    )
    assert nearest(plain, three.replace(zero_stage=1), (0, 1, 2))[0].order is None
    assert nearest(plain, three, (0, 1, 2))[0] == ordered


def test_a_member_is_replaced() -> None:
    """The layout keeps its order, and only what the lost member had moves."""
    vps = a_space(4, [LogicalTensor(str(number), (50 + number, 4)) for number in range(20)])
    ordered, assigned = nearest(vps, Layout(zero_stage=2, data=3), range(4))
    vps = vps.with_layout(ordered, assigned.members)
    again, replaced = nearest(vps, Layout(zero_stage=2, data=3), (*assigned.members[:2], 9))
    assert again == ordered and replaced.members == (*assigned.members[:2], 9)


def test_frozen_and_wide_tensors() -> None:
    """A tensor wider than a part stays where it is."""
    tensors = [LogicalTensor("wide", (400,)), *(LogicalTensor(str(n), (30,)) for n in range(20))]
    vps = a_space(5, [*tensors, LogicalTensor("frozen", (7,), FROZEN)])
    ordered, assigned = nearest(vps, Layout(zero_stage=1, data=4), (0, 1, 2, 3))
    assert ordered.order is not None and ordered.order[0] == 0
    assert assigned.bytes_moved < assign_slots(vps, Layout(zero_stage=1, data=4), (0, 1, 2, 3)).bytes_moved
