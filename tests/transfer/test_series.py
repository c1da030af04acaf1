"""Runs of one length at equal steps: found, as matrices, and weighed as if they came one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_dynatrain.space import BufferId, Piece
from ds_dynatrain.transfer import digest, digest_pieces
from ds_dynatrain.transfer.series import rows_of, series
from tests.space.laid import pieces_of

small = st.integers(0, 3)


@given(st.lists(st.tuples(small, small, small), max_size=30))
@example([(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 1, 0), (0, 2, 0)])
def test_series_tile_the_rows_and_grow_by_one_step(rows: list[tuple[int, int, int]]) -> None:
    same, first, other = (np.array([row[part] for row in rows], dtype=np.int64) for part in range(3))
    opens, counts = series(same, first, other)
    found = [row for start, count in zip(opens, counts, strict=True) for row in range(start, start + count)]
    assert found == list(range(len(rows)))
    for start, count in zip(opens.tolist(), counts.tolist(), strict=True):
        part = slice(start, start + count)
        assert len(set(same[part].tolist())) == 1 and count != 2
        assert all(len(set(np.diff(begin[part]).tolist())) <= 1 for begin in (first, other))


def test_equal_steps_are_one_series() -> None:
    begin = np.array([0, 10, 20, 30, 31, 32, 33, 90], dtype=np.int64)
    opens, counts = series(np.zeros(8, np.int64), begin)
    assert (opens.tolist(), counts.tolist()) == ([0, 4, 7], [4, 3, 1])


@pytest.mark.parametrize("step", [5, -5])
def test_matrices_read_and_write_through(step: int) -> None:
    data = np.arange(40, dtype=np.uint8)
    runs = rows_of(data, 20, step, 4, 3)
    assert runs.tolist() == [[20 + i * step + j for j in range(3)] for i in range(4)]
    runs[:] = 0
    assert data[20] == data[20 + 3 * step + 2] == 0 and data[20 + step + 3] == 20 + step + 3
    with pytest.raises(IndexError, match="leave an array of 40 bytes"):
        rows_of(data, 20, 8, 4, 3)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(3, 40), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_series_has_the_digest_of_its_runs(length: int, gap: int, count: int, dtype: torch.dtype) -> None:
    """Columns of a matrix, held densely: their digest is the sum of the runs' own."""
    width = length + gap
    whole = torch.arange(count * width + 2, dtype=torch.float32).to(dtype)
    held = torch.cat([whole[row * width + 1 : row * width + 1 + length] for row in range(count)])
    name = BufferId("tensor", 0)
    pieces = pieces_of([Piece(row * width + 1, row * width + 1 + length, name, row * length) for row in range(count)])
    runs = [digest(held[row * length : (row + 1) * length].clone(), row * width + 1) for row in range(count)]
    found = digest_pieces(pieces, {name: held}, np.array([0, len(whole)], dtype=np.int64))
    assert int(found[0]) == sum(runs) % (1 << 64)
