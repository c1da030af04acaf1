"""Moments of whole tensors against DeepSpeed's rule written down element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.space import ABSENT, Kind, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.space.expected import Address, addresses_in, buffers_under
from tests.space.models import layouts, tensor_lists, zero_rules
from tests.space.test_zero import places

WHOLE = (Kind("momentum_buffer", 2, groups=frozenset({0}), whole_tensors=True), Kind("both", 4, whole_tensors=True))


def space(tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout) -> VirtualParameterSpace:
    return VirtualParameterSpace.of(tensors, rules, standard_kinds(2, moments=WHOLE), layout, range(layout.data))


def held_by_rank(vps: VirtualParameterSpace, kind: str) -> list[dict[int, Address]]:
    return [addresses_in(buffers_under(vps, vps.layout, rank, kind)) for rank in range(vps.layout.data)]


@settings(deadline=None, max_examples=150)
@given(tensor_lists(), zero_rules, layouts)
def test_every_tensor_is_whole_where_a_part_of_it_is(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout
) -> None:
    vps = space(tensors, rules, layout)
    for kind in WHOLE:
        held = held_by_rank(vps, kind.name)
        assert [places(vps.holding(layout, rank, kind.name)) for rank in range(layout.data)] == held
        owned = [places(vps.owned(layout, rank, kind.name)) for rank in range(layout.data)]
        assert sorted(at for mine in owned for at in mine) == sorted(set().union(*held))
        for rank in range(layout.data):
            masters = places(vps.holding(layout, rank, "master"))
            assert layout.zero_stage == 0 or owned[rank].keys() <= masters.keys()
            assert owned[rank].items() <= held[rank].items()
            if layout.zero_stage in (1, 2):
                ends: dict[Address, int] = {}
                for place, index, offset in held[rank].values():
                    ends[place, index, 0] = max(ends.get((place, index, 0), 0), offset + 1)
                found = {
                    (*name, 0): size for (of, name), size in vps.local(layout, rank).sizes().items() if of == kind.name
                }
                assert found == ends


@settings(deadline=None, max_examples=100)
@given(tensor_lists(), zero_rules, st.builds(Layout, zero_stage=st.integers(1, 2), data=st.integers(1, 4)), st.data())
def test_questions(tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout, data: st.DataObject) -> None:
    vps = space(tensors, rules, layout)
    bounds = sorted(data.draw(st.sets(st.integers(0, len(vps.line)), min_size=2)) if len(vps.line) else [0, 0])
    start, stop = np.array(bounds[:-1]), np.array(bounds[1:])
    holder = np.array([data.draw(st.integers(ABSENT, layout.data - 1)) for _ in start])
    for kind in WHOLE:
        held, cut = held_by_rank(vps, kind.name), vps.sharding(layout, kind.name)
        inside = [(row, at) for row, (low, high) in enumerate(itertools.pairwise(bounds)) for at in range(low, high)]
        assert sorted(
            (row, at, rank)
            for row, low, high, rank in zip(*(column.tolist() for column in cut.holders(start, stop)), strict=True)
            for at in range(low, high)
        ) == sorted((row, at, rank) for row, at in inside for rank in range(layout.data) if at in held[rank])
        assert sorted(
            (row, at)
            for row, low, high in zip(*(column.tolist() for column in cut.lacking(start, stop, holder)), strict=True)
            for at in range(low, high)
        ) == [(row, at) for row, at in inside if holder[row] == ABSENT or at not in held[holder[row]]]
        for rank, mine in enumerate(held):
            every = np.array(sorted(mine), dtype=np.int64)
            row, low, _, buffer, offset, _ = cut.place(every, every + 1, np.full_like(every, rank))
            assert row.tolist() == list(range(len(every))) and low.tolist() == every.tolist()
            found = [(*cut.buffers[code], where) for code, where in zip(buffer.tolist(), offset.tolist(), strict=True)]
            assert found == [mine[at] for at in every.tolist()]


def test_a_rank_without_a_part_has_no_buffer() -> None:
    tensors = [LogicalTensor("a", (3, 3)), LogicalTensor("b", (1, 2)), LogicalTensor("c", (50,), 1)]
    vps = space(tensors, ZeroRules(), Layout(zero_stage=1, data=4))
    held = [vps.holding(vps.layout, rank, "momentum_buffer").numel for rank in range(4)]
    assert held == [9, 9, 11, 0]  # parts of 4 elements: a, a, a and b, padding
    named = [
        {name.index for kind, name in vps.local(vps.layout, rank).sizes() if kind == "momentum_buffer"}
        for rank in range(4)
    ]
    assert named == [{0}, {0}, {0}, set()]


@pytest.mark.parametrize("stage", [0, 3])
def test_stages_0_and_3_cut_it_as_any_moment(stage: int) -> None:
    layout = Layout(zero_stage=stage, data=3)
    vps = space([LogicalTensor("a", (7, 3)), LogicalTensor("b", (4, 2))], ZeroRules(), layout)
    for rank in range(3):
        assert places(vps.holding(layout, rank, "both")) == places(vps.holding(layout, rank, "master"))
