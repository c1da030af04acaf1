"""The order in which leaves are added: what streams through levels is the tree that a recursion writes down."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.exact.bits.sums import level_of, pairwise_sum, rest_of

numbers = st.floats(-1e6, 1e6, width=32)


def recursive(leaves: list[float]) -> float:
    """The definition: the largest power of two of leaves first, in halves, then the rest alike."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return recursive(leaves[:half]) + recursive(leaves[half:])


@given(st.lists(numbers, min_size=1, max_size=70))
def test_it_is_the_tree(leaves: list[float]) -> None:
    assert math.copysign(1, found := pairwise_sum(leaves)) == 1 or found < 0
    assert found == recursive(leaves) + 0.0


@given(st.integers(1, 5000))
def test_each_level_has_one_partial_sum_at_a_time(leaves: int) -> None:
    held: dict[int, int] = {}
    for leaf in range(leaves):
        count = 1
        for level in range(level_of(leaf)):
            assert held[level] == count == 1 << level
            count += held.pop(level)
        assert level_of(leaf) not in held
        held[level_of(leaf)] = count
    assert tuple(sorted(held)) == rest_of(leaves)
    assert max(held) < leaves.bit_length() <= math.log2(leaves) + 1


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_any_number_of_ranks_pushes_the_same(leaves: int, data: int, draw: st.DataObject) -> None:
    """Leaves come to an owner by micro-steps, in fp32."""
    rows = np.array(draw.draw(st.lists(numbers, min_size=leaves, max_size=leaves)), dtype=np.float32)
    partial = np.zeros(leaves.bit_length(), dtype=np.float32)
    for step in range(-(-leaves // data)):
        for number in range(step * data, min((step + 1) * data, leaves)):
            total = rows[number]
            for level in range(level_of(number)):
                total = partial[level] + total
            partial[level_of(number)] = total
    first, *rest = rest_of(leaves)
    found = partial[first]
    for level in rest:
        found = partial[level] + found

    def tree(part: np.ndarray) -> np.float32:
        half = 1 << (len(part) - 1).bit_length() - 1 if len(part) > 1 else 0
        return tree(part[:half]) + tree(part[half:]) if half else part[0]

    assert found.tobytes() == tree(rows).tobytes()


def test_the_order_counts() -> None:
    leaves = [1e8, 1.0, -1e8, 1.0, 3.0]
    assert pairwise_sum([np.float32(each) for each in leaves]) != np.float32(sum(np.float32(each) for each in leaves))


@pytest.mark.parametrize("leaves", [[-0.0], [-0.0, -0.0], [-0.0] * 5, []])
def test_no_zero_is_negative(leaves: list[float]) -> None:
    assert math.copysign(1, pairwise_sum(leaves)) == 1
