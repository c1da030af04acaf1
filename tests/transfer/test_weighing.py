"""The compiled sum of a digest and numpy's: one number, and no run outside its bytes."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.transfer.weighing import BLOCK_BYTES, Bytes, Compiled, HostRuns, InNumpy, is_compiled, summer

MASK = (1 << 64) - 1
CAN_COMPILE = shutil.which("cc") is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()
needs_compiled = pytest.mark.skipif(not is_compiled(), reason="the package was installed without a C compiler")
SUMMERS = [InNumpy(), pytest.param(Compiled(), marks=needs_compiled)]


def bytes_of(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.skipif(not CAN_COMPILE, reason="no C compiler here, or not what Python has for it")
def test_it_is_compiled_where_a_compiler_is() -> None:
    assert is_compiled()
    assert isinstance(summer(), Compiled)


@needs_compiled
@given(
    first=st.integers(0, 9),
    count=st.integers(0, 5),
    length=st.integers(0, 70),
    gap=st.integers(0, 20),
    spread=st.integers(0, 40),
    begin=st.one_of(st.integers(0, 20), st.integers(BLOCK_BYTES - 90, BLOCK_BYTES + 9), st.integers(0, 1 << 45)),
    backwards=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=300, deadline=None)
def test_both_give_one_number(
    first: int, count: int, length: int, gap: int, spread: int, begin: int, backwards: bool, seed: int
) -> None:
    stride, step = length + gap, max(1, length + spread)
    if backwards:
        first, stride = first + stride * max(count - 1, 0), -stride
    data = bytes_of(9 + 5 * 90, seed)
    runs = HostRuns(first, stride, count, length, begin, step)
    assert Compiled().sum(data, runs) == InNumpy().sum(data, runs) & MASK


@needs_compiled
@pytest.mark.parametrize("begin", [0, 1, 4, 8, BLOCK_BYTES - 3, 7 * BLOCK_BYTES + 12])
def test_both_give_one_number_over_many_blocks(begin: int) -> None:
    data = bytes_of(5 * BLOCK_BYTES + 77)
    for first in range(9):
        runs = HostRuns(first, 0, 1, len(data) - first, begin, 0)
        assert Compiled().sum(data, runs) == InNumpy().sum(data, runs) & MASK


@needs_compiled
def test_both_give_one_number_for_rows_that_span_blocks() -> None:
    data = bytes_of(3 * BLOCK_BYTES)
    runs = HostRuns(5, 70_001, 4, 70_000, 123, 2 * BLOCK_BYTES + 6)
    assert Compiled().sum(data, runs) == InNumpy().sum(data, runs) & MASK


@pytest.mark.parametrize("found", SUMMERS)
@pytest.mark.parametrize(
    "runs",
    [
        HostRuns(0, 0, 1, 101, 0, 0),
        HostRuns(1, 0, 1, 100, 0, 0),
        HostRuns(-1, 0, 1, 10, 0, 0),
        HostRuns(0, 30, 4, 11, 0, 30),
        HostRuns(89, -30, 4, 11, 0, 30),
    ],
)
def test_a_run_outside_is_refused(found: Compiled | InNumpy, runs: HostRuns) -> None:
    with pytest.raises(IndexError, match="leave an array of 100 bytes"):
        found.sum(bytes_of(100), runs)


@needs_compiled
@pytest.mark.parametrize("stride", [1 << 62, (1 << 63) - 1, -(1 << 62), -(1 << 63), 1, -1])
@pytest.mark.parametrize("count", [1 << 62, (1 << 63) - 1, 101])
def test_no_number_is_too_large_to_be_refused(stride: int, count: int) -> None:
    with pytest.raises(IndexError, match="leave an array of 100 bytes"):
        Compiled().sum(bytes_of(100), HostRuns(50, stride, count, 10, 0, 30))


@needs_compiled
def test_tables_that_do_not_fit_together_are_refused() -> None:
    from ds_dynatrain.transfer import weigh

    table = np.ones(4, np.uint64)
    for low, high in ((table, table[:3]), (table[:0], table[:0])):
        with pytest.raises(IndexError):
            weigh.runs(bytes_of(10), 0, 0, 1, 10, 0, 0, low, high, 1)
    with pytest.raises(IndexError):
        weigh.runs(bytes_of(10), 0, 0, 1, 10, -1, 0, table, table, 1)
    with pytest.raises(TypeError):
        weigh.runs("text", 0, 0, 1, 10, 0, 0, table, table, 1)  # type: ignore[arg-type]
