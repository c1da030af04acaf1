"""Leaves of a global batch: the same samples in every world, each trained once, weighted by their share."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.data import Leaf, LeafArithmetic
from ds_dynatrain.errors import DataError


@st.composite
def worlds(draw: st.DrawFn) -> LeafArithmetic:
    batch, micro = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    return LeafArithmetic(batch, micro, draw(st.integers(1, -(-batch // micro))))


def dealt(arithmetic: LeafArithmetic, samples: int) -> list[Leaf]:
    return [leaf for rank in range(arithmetic.data) for leaf in arithmetic.deal(samples).rank(rank)]


@given(arithmetic=worlds(), part=st.integers(0, 39))
def test_each_leaf_is_trained_once(arithmetic: LeafArithmetic, part: int) -> None:
    n = 1 + part % arithmetic.train_batch_size
    found = dealt(arithmetic, n)
    own = sorted((leaf for leaf in found if leaf.samples), key=lambda leaf: leaf.number)
    assert [leaf.number for leaf in own] == list(range(arithmetic.leaves_of(n)))
    assert [place for leaf in own for place in leaf.positions] == list(range(n))
    assert sum(Fraction(leaf.samples, n) for leaf in own) == 1
    assert len(found) == arithmetic.slots and {leaf.batch_samples for leaf in found} == {n}
    assert {leaf.leaves for leaf in found} == {len(own)}
    for leaf in found:
        assert (
            len(leaf.positions)
            <= arithmetic.largest_slot
            == arithmetic.deal(arithmetic.train_batch_size).rank(0)[0].samples
        )
        assert leaf.weight == leaf.samples / n and (leaf.samples or (leaf.number == 0 and leaf.positions[0] == 0))
    if n == arithmetic.train_batch_size:
        assert arithmetic.even() == (len({(leaf.samples, leaf.weight) for leaf in found}) == 1)


@given(one=worlds(), data=st.integers(1, 40), part=st.integers(0, 39))
def test_the_world_makes_no_difference(one: LeafArithmetic, data: int, part: int) -> None:
    n = 1 + part % one.train_batch_size
    other = LeafArithmetic(one.train_batch_size, one.micro_batch_limit, 1 + data % one.leaves)

    def trained(arithmetic: LeafArithmetic) -> dict[int, tuple[tuple[int, ...], float]]:
        return {leaf.number: (leaf.positions, leaf.weight) for leaf in dealt(arithmetic, n) if leaf.samples}

    assert trained(one) == trained(other)


@given(arithmetic=worlds(), part=st.integers(0, 39))
def test_leaves_go_to_ranks_in_turn(arithmetic: LeafArithmetic, part: int) -> None:
    n = 1 + part % arithmetic.train_batch_size
    for rank in range(arithmetic.data):
        row = arithmetic.deal(n).rank(rank)
        assert [leaf.micro_step for leaf in row] == list(range(arithmetic.accumulation))
        assert [place for leaf in row if leaf.samples for place in leaf.positions] == arithmetic.positions(rank, n)
        assert all(leaf.number == leaf.micro_step * arithmetic.data + rank for leaf in row if leaf.samples)


def test_more_ranks_than_leaves_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"10 in leaves of 4 samples is 3 leaves, and data=4 ranks .* use at most 3 data ranks"
    ):
        LeafArithmetic(10, 4, 4)


def test_shares_are_refused() -> None:
    with pytest.raises(DataError, match="leave shares out"):
        LeafArithmetic(8, 2, 2, (6, 2))


@pytest.mark.parametrize("samples", [0, 9])
def test_a_batch_of_another_size_is_refused(samples: int) -> None:
    with pytest.raises(DataError, match="cannot be dealt"):
        LeafArithmetic(8, 2, 2).deal(samples)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(DataError, match="outside the data axis"):
        LeafArithmetic(8, 2, 2).deal(8).rank(2)
