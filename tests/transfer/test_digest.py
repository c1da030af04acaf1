"""The digest: equal to a naive reference, additive over any split, sensitive to every small change."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import BufferId, Piece, Pieces
from ds_dynatrain.transfer import digest, digest_on_device, digest_pieces
from ds_dynatrain.transfer.weighing import BLOCK_UNITS, FACTOR_SEED, HIGH_SEED, LOW_SEED
from tests.space.laid import pieces_of

MASK = (1 << 64) - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
BUFFER = BufferId("group", 0)


def splitmix(value: int, seed: int) -> int:
    mixed = ((value + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def word_weight(word: int) -> int:
    """Weight of a 32-bit word, in Python's own integers."""
    unit, is_high = divmod(word, 2)
    block, at = divmod(unit, BLOCK_UNITS)
    low = splitmix(at, LOW_SEED) | 1
    inner = (splitmix(at, HIGH_SEED) | 1) + (low << 32) if is_high else low
    return inner * (splitmix(block, FACTOR_SEED) | 1) & MASK


def naive(values: torch.Tensor, start: int) -> int:
    """Byte by byte: value * 256^(byte in word) * weight of the word."""
    first = start * values.element_size()
    total = 0
    for place, byte in enumerate(bytes(values.view(torch.uint8).tolist()), start=first):
        total += (byte << (8 * (place % 4))) * word_weight(place // 4)
    return total & MASK


def values_of(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of any type (bools are 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    start=st.one_of(
        st.integers(0, 70), st.integers(2 * BLOCK_UNITS - 40, 2 * BLOCK_UNITS + 5), st.integers(0, 1 << 40)
    ),
    skip=st.integers(0, 5),
    count=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_equals_the_naive_sum_on_both_paths(dtype: torch.dtype, start: int, skip: int, count: int, seed: int) -> None:
    values = values_of(count + skip, dtype, seed)[skip:]
    expected = naive(values, start)
    assert digest(values, start) == expected
    assert digest_on_device(values, start) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@given(
    start=st.integers(0, 5 * BLOCK_UNITS),
    skip=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 3 * BLOCK_UNITS), max_size=6),
)
@settings(max_examples=25, deadline=None)
def test_any_split_adds_up(dtype: torch.dtype, start: int, skip: int, cuts: list[int]) -> None:
    values = values_of(3 * BLOCK_UNITS + skip, dtype, 7)[skip:]
    marks = [0, *sorted(cuts), len(values)]
    parts = (digest(values[low:high], start + low) for low, high in pairwise(marks))
    assert sum(parts) & MASK == digest(values, start)


def test_blocks_of_a_large_tensor_on_both_paths() -> None:
    values = values_of(70 * 2 * BLOCK_UNITS + 13, torch.float32, 3)
    for start in (0, 1, 2, 2 * BLOCK_UNITS - 1):
        assert digest(values, start) == digest_on_device(values, start)
        assert digest(values[1:], start + 1) == digest_on_device(values[1:], start + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_sees_bit_flips_swaps_and_shifts(dtype: torch.dtype, data: st.DataObject) -> None:
    count = 6 * BLOCK_UNITS
    values = values_of(count, dtype, 11)
    before = digest(values)
    place, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    words = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])

    flipped = words.clone()
    flipped[place] ^= 1 << data.draw(st.integers(0, dtype.itemsize * 8 - 2))
    assert digest(flipped) != before

    signs = words.clone()
    signs[[place, other]] ^= torch.iinfo(words.dtype).min
    assert digest(signs) != before

    swapped = words.clone()
    swapped[[place, other]] = words[[other, place]]
    assert (digest(swapped) != before) == bool(words[place] != words[other])
    assert digest(words.roll(1)) != before


def test_sees_swapped_blocks_negation_and_a_zero_in_a_zero_free_tail() -> None:
    values = torch.randn(8 * BLOCK_UNITS)
    before = digest(values)
    halves = values.view(4, 2 * BLOCK_UNITS)
    assert digest(halves[[1, 0, 2, 3]].reshape(-1)) != before
    assert digest(halves[[0, 3, 2, 1]].reshape(-1)) != before
    assert digest(-values) != before
    assert digest(values.view(-1, 2).flip(1).reshape(-1)) != before
    changed = values.clone()
    changed[-1] = 0.0
    assert digest(changed) != before
    odd = values.clone()
    odd[1::2].neg_()
    assert digest(odd) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 320), max_size=4),
    gap=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_pieces_over_many_tensors(dtype: torch.dtype, sizes: list[int], cuts: list[int], gap: int) -> None:
    bases = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(bases[-1])
    values = values_of(total, dtype, 5)
    marks = sorted({0, total, *(cut for cut in cuts if cut < total)})
    ranks: list[list[tuple[int, int]]] = [
        [],
        [],
    ]  # every second run belongs to the other rank, and lies behind a gap in its buffer
    for number, (low, high) in enumerate(pairwise(marks)):
        ranks[number % 2].append((low, high))
    sums = np.zeros(len(sizes), dtype=np.uint64)
    for runs in ranks:
        room, pieces = torch.zeros(total + gap * (len(runs) + 1), dtype=dtype), []
        at = gap
        for low, high in runs:
            room[at : at + high - low] = values[low:high]
            pieces.append(Piece(low, high, BUFFER, at))
            at += high - low + gap
        sums += digest_pieces(pieces_of(pieces), {BUFFER: room}, bases)
    assert sums.tolist() == [digest(values[low:high]) for low, high in pairwise(bases.tolist())]


def test_bad_pieces_are_refused() -> None:
    bases = np.array([0, 10])
    room = torch.zeros(10)
    with pytest.raises(TransferError, match="leaves buffer"):
        digest_pieces(pieces_of([Piece(0, 10, BUFFER, 1)]), {BUFFER: room}, bases)
    with pytest.raises(TransferError, match="leave the line"):
        digest_pieces(pieces_of([Piece(5, 11, BUFFER, 0)]), {BUFFER: room}, bases)
    with pytest.raises(TransferError, match="not among"):
        digest_pieces(pieces_of([Piece(0, 10, BUFFER, 0)]), {}, bases)
    with pytest.raises(TransferError, match="flatten"):
        digest(torch.zeros(2, 2))
    assert digest_pieces(Pieces.empty(), {}, bases).tolist() == [0]
