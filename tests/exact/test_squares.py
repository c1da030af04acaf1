"""A sum of squares on a grid: right, the same however the numbers are dealt, and compiled as in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import TransferError
from ds_dynatrain.exact.bits.squares import Floats, Grid, in_numpy, largest, largest_in_numpy, square_sums
from ds_dynatrain.transfer import is_compiled

needs_compiled = pytest.mark.skipif(not is_compiled(), reason="the package was installed without a C compiler")
floats = st.floats(allow_nan=False, allow_infinity=False, width=32)


def total(parts: list[Floats]) -> float:
    """As ranks do it that hold a part each."""
    most, count = max(map(largest, parts)), sum(part.size for part in parts)
    if most == 0:
        return 0.0
    grid = Grid.of(most, count)
    sums = [square_sums(part, grid) for part in parts]
    return grid.total(sum(high for high, _ in sums), sum(low for _, low in sums))


def random(count: int, seed: int, spread: float = 3.0) -> Floats:
    stream = np.random.default_rng(seed)
    return (stream.standard_normal(count) * np.exp(spread * stream.standard_normal(count))).astype(np.float32)


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=200))
def test_it_is_the_sum_of_squares(values: list[float]) -> None:
    held = np.array(values, dtype=np.float32)
    true = math.fsum(float(value) ** 2 for value in held)
    assert total([held]) == pytest.approx(true, rel=1e-15, abs=0)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 99), st.lists(st.floats(0, 1), max_size=6))
def test_whoever_holds_what(count: int, seed: int, cuts: list[float]) -> None:
    values = random(count, seed, spread=8.0)
    at = sorted(int(cut * count) for cut in cuts)
    parts = [part.copy() for part in np.split(values, at)]
    assert total(parts) == total([values]) == total([values[::-1].copy()])


@needs_compiled
@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 99), st.integers(0, 5), st.integers(1, 50), st.integers(0, 20))
def test_both_give_the_same_integers(count: int, seed: int, skip: int, bits: int, above: int) -> None:
    values = random(count + skip, seed)[skip:]
    grid = Grid(math.frexp(max(largest(values), 1e-30) ** 2)[1] + above, bits)
    by = math.ldexp(1.0, grid.bits - grid.exponent), math.ldexp(1.0, grid.bits)
    assert square_sums(values, grid) == in_numpy(values, *by)
    assert largest(values) == largest_in_numpy(values)


@needs_compiled
def test_both_give_the_same_integers_of_many() -> None:
    values = random(1_000_003, 5)
    grid = Grid.of(largest(values), values.size)
    by = math.ldexp(1.0, grid.bits - grid.exponent), math.ldexp(1.0, grid.bits)
    assert square_sums(values, grid) == in_numpy(values, *by)
    assert total([values]) == pytest.approx(math.fsum(values.astype(np.float64) ** 2), rel=1e-15)


@pytest.mark.parametrize("exponent", [-149, -126, 0, 127])
def test_nothing_is_too_large_or_too_small(exponent: int) -> None:
    held = np.full(1000, math.ldexp(1.0, exponent), dtype=np.float32)
    assert total([held]) == 1000 * math.ldexp(1.0, 2 * exponent)


def test_the_sum_of_as_many_as_the_grid_is_for_fits() -> None:
    for count in (1, 1000, 1 << 30, 1 << 40):
        grid = Grid.of(1.5, count)
        ((high, low),) = [square_sums(np.array([1.5], dtype=np.float32), grid)]
        assert abs(high * count) < 1 << 63 and abs(low) < 1 << grid.bits and grid.total(high, low) == 2.25


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_told(wrong: float) -> None:
    values = np.array([1.0, wrong, 2.0], dtype=np.float32)
    assert largest(values) == largest_in_numpy(values) == math.inf
    with pytest.raises(TransferError, match="no grid"):
        Grid.of(math.inf, 3)


def test_empty_and_zero() -> None:
    assert largest(np.zeros(0, dtype=np.float32)) == 0.0
    assert total([np.zeros(5, dtype=np.float32)]) == 0.0
    assert square_sums(np.zeros(0, dtype=np.float32), Grid.of(1.0, 1)) == (0, 0)


@pytest.mark.parametrize("values", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_other_arrays_are_refused(values: Floats) -> None:
    with pytest.raises(TransferError, match="1-D contiguous fp32"):
        largest(values)
    with pytest.raises(TransferError, match="1-D contiguous fp32"):
        square_sums(values, Grid.of(1.0, 4))
