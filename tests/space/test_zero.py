"""ZeRO's arithmetic against its layout written down element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import (
    FROZEN,
    CoordinateLine,
    Kind,
    Layout,
    LogicalTensor,
    Pieces,
    VirtualParameterSpace,
    ZeroRules,
    zero,
)
from tests.space.expected import Address, addresses
from tests.space.laid import checked
from tests.space.models import layouts, space, tensor_lists, zero_rules

KINDS = ("weight", "master", "exp_avg", "stale_grad")


def places(pieces: Pieces) -> dict[int, Address]:
    checked(pieces)
    return {
        piece.start + step: (piece.buffer.place, piece.buffer.index, piece.offset + step)
        for piece in pieces
        for step in range(piece.stop - piece.start)
    }


@settings(deadline=None, max_examples=150)
@given(tensor_lists(), zero_rules, layouts)
def test_every_element_is_where_deepspeed_puts_it(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout
) -> None:
    vps = space(tensors, rules, layout, tuple(range(layout.data)))
    for kind in KINDS:
        for rank in range(layout.data):
            assert places(vps.holding(layout, rank, kind)) == addresses(tensors, rules, layout, rank, kind)


@settings(deadline=None, max_examples=100)
@given(tensor_lists(), zero_rules, layouts, st.data())
def test_owners_tile_the_kind(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout, data: st.DataObject
) -> None:
    vps = space(tensors, rules, layout, tuple(range(layout.data)))
    for kind in KINDS:
        held = [places(vps.holding(layout, rank, kind)) for rank in range(layout.data)]
        everything = sorted(set().union(*held))
        owned = [places(vps.owned(layout, rank, kind)) for rank in range(layout.data)]
        assert sorted(at for mine in owned for at in mine) == everything
        assert all(mine.items() <= of_rank.items() for mine, of_rank in zip(owned, held, strict=True))
        low = data.draw(st.integers(0, len(vps.line)))
        high = data.draw(st.integers(low, len(vps.line)))
        _, *columns = vps.sharding(layout, kind).owners(np.array([low]), np.array([high]))
        found = {
            at: rank
            for start, stop, rank in zip(*(column.tolist() for column in columns), strict=True)
            for at in range(start, stop)
        }
        assert found == {at: rank for rank, mine in enumerate(owned) for at in mine if low <= at < high}
        cut = vps.sharding(layout, kind)
        every = np.array(everything, dtype=np.int64)
        rank_of = np.array([next(r for r in range(layout.data) if at in owned[r]) for at in everything], dtype=np.int64)
        _, start, _, buffer, offset, _ = cut.place(every, every + 1, rank_of)
        for at, code, where, rank in zip(
            start.tolist(), buffer.tolist(), offset.tolist(), rank_of.tolist(), strict=True
        ):
            assert (*cut.buffers[code], where) == held[rank][at]


def test_the_measured_example() -> None:
    tensors = [LogicalTensor(name, (size,)) for name, size in zip("abcdef", (35, 7, 21, 3, 3, 3), strict=True)]
    vps = space(tensors, ZeroRules(), Layout(zero_stage=1, data=2), (0, 1))
    first, second = (vps.holding(vps.layout, rank, "master") for rank in (0, 1))
    assert (first.numel, second.numel) == (36, 36)
    assert vps.bases.tolist()[:3] == [0, 35, 42]
    three = Layout(zero_stage=3, data=2)
    assert [vps.holding(three, rank, "master").numel for rank in (0, 1)] == [18 + 4 + 11 + 6, 17 + 3 + 10 + 3]


def test_split_by_tensor_keeps_addresses() -> None:
    tensors = [
        LogicalTensor("a", (3,)),
        LogicalTensor("none", (0, 2)),
        LogicalTensor("b", (2, 2)),
        LogicalTensor("c", ()),
    ]
    vps = space(tensors, ZeroRules(), Layout(zero_stage=1, data=1), (0,))
    number, parts = vps.split_by_tensor(vps.holding(vps.layout, 0, "master"))
    assert number.tolist() == [0, 2, 3]
    assert parts.start.tolist() == [0, 3, 7] and parts.offset.tolist() == [0, 3, 7]


def test_refusals() -> None:
    tensors = [LogicalTensor("a", (3,))]
    with pytest.raises(LayoutError, match=r"pipe=2 .*: this model is dealt out by data and sequence only"):
        space(tensors, ZeroRules(), Layout(zero_stage=1, pipe=2), (0, 1)).holding(
            Layout(zero_stage=1, pipe=2), 0, "master"
        )
    with pytest.raises(LayoutError, match="2 ranks and 1 members"):
        space(tensors, ZeroRules(), Layout(zero_stage=1, data=2), (0,))
    with pytest.raises(LayoutError, match="two ranks"):
        space(tensors, ZeroRules(), Layout(zero_stage=1, data=2), (4, 4))
    with pytest.raises(LayoutError, match="no state kind 'momentum'"):
        space(tensors, ZeroRules(), Layout(zero_stage=1), (0,)).holding(Layout(zero_stage=1), 0, "momentum")
    with pytest.raises(LayoutError, match="used twice: a"):
        CoordinateLine((LogicalTensor("a", (3,)), LogicalTensor("a", (4,))))
    with pytest.raises(LayoutError, match="register group 0, 1"):
        CoordinateLine((LogicalTensor("a", (3,), FROZEN), LogicalTensor("b", (4,), 0)))
    with pytest.raises(LayoutError, match="reads 'b'"):
        kinds = [Kind("a", 2, ("a", "b")), Kind("b", 4)]
        VirtualParameterSpace.of(tensors, ZeroRules(), kinds, Layout(zero_stage=1), (0,))
    with pytest.raises(LayoutError, match="no tensor 'z'"):
        CoordinateLine(tuple(tensors)).index("z")
    with pytest.raises(LayoutError, match="negative dim"):
        LogicalTensor("a", (-1,))


def test_tensors_dealt_in_turn_and_aligned() -> None:
    """The sizes of the measured example under `round_robin_gradients` and `parameter_alignment` in fp32."""
    tensors = [LogicalTensor(name, (size,)) for name, size in zip("abcdef", (35, 7, 21, 3, 3, 3), strict=True)]
    stages = frozenset({1, 2})
    two, three = Layout(zero_stage=1, data=2), Layout(zero_stage=1, data=3)
    dealt = space(tensors, ZeroRules(round_robin_stages=stages), two, (0, 1))
    order = zero.flat_order(dealt.line, dealt.rules, two, 0)
    assert (order[0].tolist(), order[1].tolist(), order[2]) == ([0, 2, 4, 1, 3, 5], [0, 35, 56, 59, 66, 69], 72)
    assert zero.flat_order(dealt.line, dealt.rules, three, 0)[0].tolist() == [0, 3, 1, 4, 2, 5]
    assert zero.flat_order(dealt.line, dealt.rules, Layout(zero_stage=3, data=2), 0)[0].tolist() == [*range(6)]
    assert [piece[:2] + piece[3:] for piece in dealt.holding(two, 0, "master")] == [(0, 35, 0), (42, 43, 35)]
    assert [piece[:2] + piece[3:] for piece in dealt.holding(two, 1, "master")] == [
        (35, 42, 23),
        (43, 63, 0),
        (63, 66, 30),
        (66, 69, 20),
        (69, 72, 33),
    ]
    both = space(tensors, ZeroRules(round_robin_stages=stages, aligned_stages=stages, weight_alignment=4), two, (0, 1))
    order = zero.flat_order(both.line, both.rules, two, 0)
    assert (order[1].tolist(), order[2]) == ([0, 36, 60, 64, 72, 76], 79)
    assert zero.partition_size(both.line, both.rules, two, 0) == 40


def test_a_plain_flat_group_is_one_segment() -> None:
    tensors = [LogicalTensor(f"t{number}", (number % 3,), number // 5) for number in range(10)]
    rules = ZeroRules(aligned_stages=frozenset({2}), weight_alignment=8)
    layout = Layout(zero_stage=1, data=4)
    vps = space(tensors, rules, layout, (0, 1, 2, 3))
    assert vps.sharding(layout, "master").start.tolist() == [0, 4]
    assert vps.sharding(Layout(zero_stage=2, data=4), "master").lead.tolist() == [0, 8, 16, 0, 8, 16]
