"""Layouts: what is valid, how ranks are ordered, how they read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import Kind, Layout, standard_kinds

sizes = st.integers(1, 4)


@given(st.integers(0, 3), sizes, sizes, sizes, sizes)
def test_every_rank_has_one_place(stage: int, data: int, pipe: int, sequence: int, tensor: int) -> None:
    layout = Layout(zero_stage=stage, data=data, pipe=pipe, sequence=sequence, tensor=tensor)
    assert layout.world_size == data * pipe * sequence * tensor
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert [layout.rank(**place) for place in places] == list(range(layout.world_size))
    assert places == sorted(places, key=lambda place: tuple(place.values()))
    assert Layout.from_dict(layout.to_dict()) == layout
    assert layout.replace(data=data) == layout


def test_it_reads_short() -> None:
    assert str(Layout(zero_stage=2, data=4)) == "data=4 zero_stage=2"
    assert str(Layout(zero_stage=0)) == "data=1 zero_stage=0"
    assert str(Layout(zero_stage=1, data=2, pipe=2, expert=2)) == "data=2 pipe=2 expert=2 zero_stage=1"


def test_boundaries_belong_to_a_number_of_stages() -> None:
    layout = Layout(zero_stage=1, pipe=2, boundaries=(0, 3, 7))
    assert str(layout) == "data=1 pipe=2 boundaries=0,3,7 zero_stage=1"
    assert "boundaries" not in layout.axes() and layout.world_size == 2
    assert layout.to_dict()["boundaries"] == [0, 3, 7]
    assert Layout.from_dict(layout.to_dict()) == layout == layout.replace(boundaries=(0, 3, 7))
    assert "boundaries" not in Layout(zero_stage=1, pipe=2).to_dict()
    assert layout.replace(data=2, pipe=2).boundaries == (0, 3, 7)
    assert layout.replace(pipe=4).boundaries is None
    assert layout.replace(pipe=1, boundaries=(0, 7)).boundaries == (0, 7)
    assert len({layout, Layout(zero_stage=1, pipe=2, boundaries=(0, 4, 7)), layout.replace(boundaries=None)}) == 3


def test_shares_belong_to_a_number_of_data_indices() -> None:
    layout = Layout(zero_stage=1, data=2, shares=(3, 5))
    assert str(layout) == "data=2 shares=3,5 zero_stage=1"
    assert "shares" not in layout.axes() and layout.to_dict()["shares"] == [3, 5]
    assert Layout.from_dict(layout.to_dict()) == layout == layout.replace(shares=[3, 5])
    assert layout.replace(zero_stage=2, pipe=2).shares == (3, 5)
    assert layout.replace(data=4).shares is None and layout.replace(data=1, shares=(8,)).shares == (8,)


@pytest.mark.parametrize(
    ("shares", "words"),
    [((3,), "for 1 data indices"), ((8, 0), "data index 1 without"), ((1.5, 2), "no tuple of whole"), (8, "no tuple")],
)
def test_impossible_shares_say_why(shares: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout(zero_stage=1, data=2, shares=shares)


def test_a_map_of_experts_belongs_to_an_expert_size() -> None:
    layout = Layout(zero_stage=1, data=2, expert=2, experts=(((0, 1), (2, 3)), ((0, 2), (1, 3))))
    assert str(layout) == "data=2 expert=2 experts=moved:2 zero_stage=1"
    assert "experts" not in layout.axes() and layout.to_dict()["experts"] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert Layout.from_dict(layout.to_dict()) == layout == layout.replace(experts=layout.to_dict()["experts"])
    assert layout.replace(zero_stage=2, pipe=2, data=4).experts == layout.experts
    assert layout.replace(expert=1).experts is None
    in_order = layout.replace(experts=[[[0, 1], [2, 3]]])
    assert in_order == layout.replace(experts=None) and "experts" not in in_order.to_dict()
    assert Layout(zero_stage=1, experts=(((0, 1),),)).experts is None


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (((0, 1, 2, 3),), "no map of experts"),
        ([[[0], [1]]], "no map of experts"),
        ((((0,), (1.5,)),), "no map of experts"),
        ((((0, 1), (2, 3)), ((0,), (1,), (2,))), "layer 1 are for 3 indices and expert is 2"),
        ((((0, 1, 2), (3,)),), "layer 0: the indices have 3, 1 of 4 experts"),
        ((((0, 2), (2, 5)),), r"layer 0: of 0 to 3, \[1, 3\] have no index, \[2\] have two, and \[5\] do not exist"),
    ],
)
def test_impossible_maps_of_experts_say_why(experts: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout(zero_stage=1, data=2, expert=2, experts=experts)


def test_one_index_has_no_order() -> None:
    with pytest.raises(LayoutError, match="expert is 1"):
        Layout(zero_stage=1, experts=(((1, 0),),))


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        ((0, 7), r"cut 1 stages and pipe is 2.*3 numbers"),
        ((), "cut 0 stages"),
        ((1, 3, 7), "leave out layers 0 to 0"),
        ((0, 3, 3), "give stage 1 no layer: 3 is not below 3"),
        ((0, 9, 7), "give stage 1 no layer: 9"),
        ((0, 3.0, 7), "no tuple of whole numbers"),
        ((False, 3, 7), "no tuple of whole numbers"),
        ("0,3,7", "no tuple of whole numbers"),
    ],
)
def test_impossible_boundaries_say_why(boundaries: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout(zero_stage=1, pipe=2, boundaries=boundaries)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"zero_stage": 1, "data": 0}, "data=0 is below 1"),
        ({"zero_stage": 1, "data": 2.0}, "whole number"),
        ({"zero_stage": True}, "whole number"),
        ({"zero_stage": 1, "data": 3, "expert": 2}, r"data x sequence x tensor = 3 x 1 x 1 = 3 \(remainder 1\)"),
        ({"zero_stage": 1, "width": 2}, "no 'width'; give one of zero_stage, data"),
        ({"data": 2}, "zero_stage is missing among data"),
    ],
)
def test_impossible_layouts_say_why(values: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.from_dict(values)


def test_places_outside_of_the_world() -> None:
    layout = Layout(zero_stage=1, data=2)
    with pytest.raises(LayoutError, match="rank 2 is not in a world of 2"):
        layout.coordinate(2)
    with pytest.raises(LayoutError, match="data index 2"):
        layout.rank(data=2)
    with pytest.raises(LayoutError, match="no axis 'expert'"):
        layout.rank(expert=0)


def test_kinds_know_their_equals() -> None:
    weight, master = standard_kinds(4)[:2]
    assert weight.sources == ("weight", "master") and master.sources == ("master", "weight")
    weight, master, *moments, stale = standard_kinds(2, moments=(Kind("exp_avg", 2), "exp_avg_sq"), stale_grad=4)
    assert (weight.itemsize, master.itemsize, stale.itemsize) == (2, 4, 4) and weight.derived_from == "master"
    assert weight.sources == ("weight",) and [kind.itemsize for kind in moments] == [2, 4]
    assert [kind.name for kind in standard_kinds(2)] == ["weight", "master", "exp_avg", "exp_avg_sq"]
    assert Kind("any", 1).sources == ("any",)
    with pytest.raises(LayoutError, match="0 bytes"):
        Kind("any", 0)
