"""Micro-batches by column: as few as they can be in the longest one, and all samples in them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import Columns


@given(samples=st.integers(1, 200), limit=st.integers(1, 20), columns=st.integers(1, 12))
def test_as_even_as_they_go(samples: int, limit: int, columns: int) -> None:
    columns = min(columns, samples)
    found = Columns.of(samples, limit, columns)
    assert sum(found.shares) == samples and found.size <= limit and len(found.counts) == columns
    assert found.longest - min(found.counts) <= 1 and list(found.counts) == sorted(found.counts, reverse=True)
    assert found.total == samples // found.size and found.mean * columns == pytest.approx(found.total)
    sizes = [size for size in range(1, limit + 1) if samples % size == 0 and samples // size >= columns]
    best = min((-(-(samples // size) // columns), size) for size in sizes)
    assert (found.longest, found.size) == best
    assert Columns.of(samples, found.size, columns) == found, "its own size as the limit changes nothing"


@given(samples=st.integers(1, 200), limit=st.integers(1, 20), columns=st.integers(1, 12))
def test_what_divides_is_cut_into_as_few_as_hold_it(samples: int, limit: int, columns: int) -> None:
    fewest = math.ceil(math.ceil(samples / columns) / limit)
    if samples % (columns * fewest) == 0:
        found = Columns.of(samples, limit, columns)
        assert found.is_even and found.longest == fewest and found.size == samples // (columns * fewest)


@given(shares=st.lists(st.integers(1, 60), min_size=1, max_size=6), limit=st.integers(1, 12))
def test_by_shares(shares: list[int], limit: int) -> None:
    found = Columns.of(sum(shares), limit, len(shares), tuple(shares))
    assert found.shares == tuple(shares) and found.size <= limit
    assert not any(all(share % size == 0 for share in shares) for size in range(found.size + 1, limit + 1))
    assert found.is_even == (len(set(shares)) == 1)
    assert Columns.of(sum(shares), found.size, len(shares), tuple(shares)) == found


def test_sixty_four_on_five() -> None:
    assert Columns.of(64, 1, 5) == Columns(1, (13, 13, 13, 13, 12))
    assert Columns.of(64, 4, 5) == Columns(4, (4, 3, 3, 3, 3))
    assert Columns.of(64, 4, 2, (24, 40)) == Columns(4, (6, 10))


def test_a_column_without_a_micro_batch() -> None:
    with pytest.raises(LayoutError, match="3 samples over 4 columns"):
        Columns.of(3, 1, 4)
    for size, counts in ((1, (1, 0)), (0, (1,)), (1, ())):
        with pytest.raises(LayoutError, match="each has one at least"):
            Columns(size, counts)
