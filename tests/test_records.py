"""Records: what goes in comes out, also by way of JSON, and nothing else is taken."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.errors import TransferError
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space.layout import Layout


@dataclass(frozen=True)
class Held:
    """One of everything that records are made of."""

    layout: Layout
    ranks: tuple[int, ...]
    names: dict[int, str]
    loss: float | None = None


HELD = Held(Layout(zero_stage=1, data=2), (0, 3), {2: "two"})


@given(
    st.lists(st.integers(0, 2**40)), st.dictionaries(st.integers(), st.text()), st.none() | st.floats(allow_nan=False)
)
def test_what_goes_in_comes_out(ranks: list[int], names: dict[int, str], loss: float | None) -> None:
    held = Held(Layout(zero_stage=2, data=4, pipe=2, boundaries=(0, 3, 5)), tuple(ranks), names, loss)
    record = to_record(held)
    assert from_record(Held, record) == held
    assert from_record(Held, json.loads(json.dumps(record))) == held


@pytest.mark.parametrize(
    "record",
    [
        {},
        [],
        {**to_record(HELD), "more": 1},
        {**to_record(HELD), "ranks": "all"},
        {**to_record(HELD), "layout": {"data": 2}},
        {**to_record(HELD), "loss": "small"},
    ],
)
def test_nothing_else_is_taken(record: object) -> None:
    with pytest.raises(TransferError, match="no record of a Held"):
        from_record(Held, record)
