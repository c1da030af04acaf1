"""Who hears whom, and what their records look like on the way."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.errors import TransferError
from ds_dynatrain.membership.control import Control, pack, unpack
from ds_dynatrain.membership.session import Session, heard_by


@given(st.integers(1, 700), st.integers(2, 9), st.integers(0, 1 << 32))
def test_everybody_is_heard_once_and_nobody_hears_too_many(count: int, width: int, seed: int) -> None:
    members = tuple(Random(seed).sample(range(2 * count), count))
    levels = [level for member in members for level in heard_by(member, members, width)]
    heard = Counter(other for level in levels for other in level)
    assert heard == Counter(member for member in members if member != members[0])
    assert all(len(level) < width for level in levels)


@given(st.integers(1, 400))
def test_what_is_joined_keeps_its_order(count: int) -> None:
    """From the leaves on: who leads others comes after them, so that nobody waits."""
    store, members = HashStore(), tuple(range(count))
    for member in reversed(members):
        session = Session(Control(store, "job", member, 1.0), "it", members, "doing it")
        found = session.gather("step", [member], lambda one, other: one + other)
    assert found == list(members)


WORDS = st.text(max_size=8).filter(lambda word: word != "__array__")
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | WORDS
ARRAYS = st.lists(st.integers(0, (1 << 64) - 1), max_size=5).map(lambda values: np.array(values, np.uint64))
VALUES = st.recursive(
    LEAVES | ARRAYS, lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3)
)


def plain(value: Any) -> Any:
    """With arrays told from lists."""
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, list):
        return [plain(part) for part in value]
    return {name: plain(part) for name, part in value.items()} if isinstance(value, dict) else value


@given(VALUES)
def test_what_is_packed_comes_out(value: Any) -> None:
    assert plain(unpack(pack(value))) == plain(value)


def test_what_is_cut_short_is_refused() -> None:
    data = pack({"sums": np.arange(100, dtype=np.uint64)})
    for end in (5, 20, len(data) - 1):
        with pytest.raises(TransferError, match=f"a record of {end} bytes cannot be read"):
            unpack(data[:end])


def test_only_arrays_of_digests_are_packed() -> None:
    with pytest.raises(TypeError, match="a ndarray is neither"):
        pack({"x": np.zeros(3)})
