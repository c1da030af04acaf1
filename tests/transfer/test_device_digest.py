"""Programs of the kernel for digests, played here: together they read every byte once and add up to the digest.

That the kernel itself does so is shown on a card (`tests/gpu`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.transfer import device_digest, digest
from ds_dynatrain.transfer.device_digest import DeviceRuns, by_arithmetic, programs, weights
from ds_dynatrain.transfer.weighing import BLOCK_BYTES, SLICES, WORD_BYTES, factors

SLICE_BYTES = BLOCK_BYTES // SLICES
WEIGHTS = weights(torch.device("cpu")).numpy().view(np.uint64)


def runs_of(begin: int, length: int) -> DeviceRuns:
    return DeviceRuns(*(np.array([value]) for value in (0, begin, length, 0)))


def play(words: np.ndarray, begin: int) -> tuple[int, int]:
    """(digest, bytes read) of 32-bit words that begin at byte `begin` of their tensor."""
    total, read, end = 0, 0, begin + words.nbytes
    for _, part, first, number in zip(
        *(column.tolist() for column in programs(runs_of(begin, words.nbytes))), strict=True
    ):
        for block in range(first, first + number):
            at = block * BLOCK_BYTES + part * SLICE_BYTES
            low, high = max(at, begin), min(at + SLICE_BYTES, end)
            if low < high:
                read += high - low
                values = words[(low - begin) // WORD_BYTES : (high - begin) // WORD_BYTES].astype(np.uint64)
                weight = WEIGHTS[low % BLOCK_BYTES // WORD_BYTES :][: len(values)]
                total += int((values * weight).sum(dtype=np.uint64)) * int(factors(block, 1)[0])
    return total % (1 << 64), read


@pytest.mark.parametrize("begin", [0, 5, 3 * BLOCK_BYTES // WORD_BYTES - 7])
@pytest.mark.parametrize("number", [1, 3000, 2 * BLOCK_BYTES // WORD_BYTES, 40 * BLOCK_BYTES // WORD_BYTES + 11])
def test_programs_add_up_to_the_digest(begin: int, number: int) -> None:
    values = torch.randint(-(1 << 31), 1 << 31, (number,), generator=torch.Generator().manual_seed(number)).int()
    found, read = play(values.numpy().view(np.uint32), WORD_BYTES * begin)
    assert read == WORD_BYTES * number
    assert found == digest(values, begin) == by_arithmetic(values.view(torch.uint8), WORD_BYTES * begin)


@given(st.integers(0, 100 * BLOCK_BYTES), st.integers(0, 70 * BLOCK_BYTES))
def test_programs_read_every_byte_once(begin: int, length: int) -> None:
    read = []
    for _, part, first, number in zip(*(column.tolist() for column in programs(runs_of(begin, length))), strict=True):
        for block in range(first, first + number):
            at = block * BLOCK_BYTES + part * SLICE_BYTES
            read.append((max(at, begin), min(at + SLICE_BYTES, begin + length)))
    there = sorted((low, high) for low, high in read if low < high)
    ends = [begin, *(high for _, high in there)]
    assert [low for low, _ in there] == ends[:-1], "each begins where the one before it ends"
    assert ends[-1] == begin + length


@pytest.mark.parametrize(("begin", "length", "width"), [(8, 12, 4), (8, 6, 2), (2, 8, 2), (1, 8, 1), (0, 0, 4)])
def test_the_width_divides_what_is_read(begin: int, length: int, width: int) -> None:
    assert device_digest._width(*runs_of(begin, length)[:3]) == width
