"""What a refusal proposes is not refused by the same check."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes
from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.reshard import feasible
from ds_dynatrain.space import Layout
from ds_dynatrain.support.axes import EXPERTS, NATIVE_EXPERTS, PIPELINE, ULYSSES, refusal

SIZES = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    data, sequence, tensor = draw(SIZES), draw(SIZES), draw(SIZES)
    expert = draw(st.sampled_from([size for size in range(1, 10) if data * sequence * tensor % size == 0]))
    sizes = {"data": data, "sequence": sequence, "tensor": tensor, "expert": expert, "pipe": draw(SIZES)}
    return Layout(**sizes, zero_stage=draw(st.integers(0, 3)))


def proposed(way_out: str) -> list[Layout]:
    """The layouts that a way out names."""
    assert way_out.startswith("nearest: ")
    found = []
    for text in way_out.removeprefix("nearest: ").split(" or "):
        found.append(Layout(**{name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text)}))
    return found


@given(layouts(), st.integers(1, 20))
def test_what_needs_fewer_ranks_is_proposed(layout: Layout, processes: int) -> None:
    try:
        feasible.check_size(layout, processes)
    except SwitchRefused as refused:
        for other in proposed(refused.way_out):
            feasible.check_size(other, processes)
            assert other.zero_stage == layout.zero_stage
            for axis, size in layout.axes().items():
                assert axis == "data" or size % other.axes()[axis] == 0, "nobody asked for it"


@given(layouts(), st.integers(1, 12))
def test_what_the_batch_can_be_dealt_to_is_proposed(layout: Layout, size: int) -> None:
    module = nn.Linear(1, 1)
    try:
        feasible.check_batch(layout, BatchSizes(size, size), module)
    except SwitchRefused as refused:
        for other in proposed(refused.way_out):
            feasible.check_batch(other, BatchSizes(size, size), module)
            assert other.world_size <= layout.world_size


@given(layouts(), st.integers(1, 20), st.sets(st.sampled_from([PIPELINE, EXPERTS, NATIVE_EXPERTS, ULYSSES])))
def test_a_combination_that_trains_is_proposed(layout: Layout, processes: int, parts: set[str]) -> None:
    features = frozenset(parts)
    found = refusal(features, layout, processes)
    for other in proposed(found.instead) if found is not None else []:
        assert refusal(features, other, processes) is None and other.world_size <= processes


@pytest.mark.parametrize(
    ("asked", "processes", "nearest"),
    [
        ({"data": 8, "tensor": 2}, 4, "data=2 tensor=2 zero_stage=1"),
        ({"data": 8, "tensor": 2}, 5, "data=2 tensor=2 zero_stage=1"),
        ({"tensor": 8}, 4, "data=1 tensor=4 zero_stage=1"),
        ({"tensor": 8}, 5, "data=1 tensor=4 zero_stage=1"),
        ({"data": 8, "expert": 4}, 6, "data=4 expert=4 zero_stage=1"),
        ({"data": 5}, 4, "data=4 zero_stage=1"),
    ],
)
def test_one_size_is_made_smaller_where_that_is_enough(asked: dict[str, int], processes: int, nearest: str) -> None:
    with pytest.raises(SwitchRefused, match=f"nearest: {nearest}$"):
        feasible.check_size(Layout(**asked, zero_stage=1), processes)


def test_a_batch_that_experts_do_not_divide() -> None:
    with pytest.raises(SwitchRefused, match=r"nearest: data=4 expert=4 zero_stage=1$"):
        feasible.check_batch(Layout(data=8, expert=4, zero_stage=1), BatchSizes(6, 6), nn.Linear(1, 1))
    with pytest.raises(LayoutError, match="does not divide"):
        Layout(data=6, expert=4, zero_stage=1)
