"""How a global batch is dealt: property tests, and the same micro-batches as stock torch where the sizes divide."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ds_dynatrain.data import BatchArithmetic, ColumnArithmetic, EpochOrder, nearest_even
from ds_dynatrain.errors import DataError

sizes = st.integers(1, 40)


@st.composite
def worlds(draw: st.DrawFn) -> BatchArithmetic:
    """Any, with shares or without."""
    limit = draw(st.integers(1, 12))
    if draw(st.booleans()):
        return BatchArithmetic(draw(sizes), limit, draw(st.integers(1, 8)))
    shares = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=6)))
    return BatchArithmetic(sum(shares), limit, len(shares), shares)


@given(arithmetic=worlds(), part=st.integers(0, 39))
def test_each_position_is_dealt_once_and_weights_sum_to_slots(arithmetic: BatchArithmetic, part: int) -> None:
    limit, n = arithmetic.micro_batch_limit, 1 + part % arithmetic.train_batch_size
    rows = [arithmetic.deal(n).rank(rank) for rank in range(arithmetic.data)]
    slots = [slot for row in rows for slot in row]
    own = sorted(position for slot in slots if slot.samples for position in slot.positions)
    assert own == list(range(n))
    assert len(slots) == arithmetic.slots and {len(row) for row in rows} == {arithmetic.accumulation}
    assert sum(Fraction(slot.samples * arithmetic.slots, n) for slot in slots) == arithmetic.slots
    assert sum(slot.weight for slot in slots) == pytest.approx(arithmetic.slots)
    for row in rows:
        counts = [slot.samples for slot in row]
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1 and counts[0] <= limit
    for slot in slots:
        assert slot.samples in (0, len(slot.positions)) and (slot.samples or slot.positions == (0,))
        assert (slot.weight == 0) == (slot.samples == 0)
    full = arithmetic.deal(arithmetic.train_batch_size)
    weights = [slot.weight for rank in range(arithmetic.data) for slot in full.rank(rank)]
    assert arithmetic.even() == all(weight == 1.0 for weight in weights)


@settings(deadline=None)
@given(arithmetic=worlds(), part=st.integers(0, 39))
def test_weighted_slot_means_average_to_the_mean_of_the_samples(arithmetic: BatchArithmetic, part: int) -> None:
    n = 1 + part % arithmetic.train_batch_size
    losses = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    ranks = [
        sum(losses[list(slot.positions)].mean() * slot.weight / arithmetic.accumulation for slot in row)
        for row in [arithmetic.deal(n).rank(rank) for rank in range(arithmetic.data)]
    ]
    torch.testing.assert_close(sum(ranks) / arithmetic.data, losses.mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_even_batches_are_those_of_stock_torch(world: int, accumulation: int, micro: int) -> None:
    batch = world * accumulation * micro
    dataset = list(range(5 * batch))
    order = EpochOrder(len(dataset), batch)
    arithmetic = BatchArithmetic(batch, micro, world)
    assert arithmetic.accumulation == accumulation
    for rank in range(world):
        sampler = DistributedSampler(dataset, num_replicas=world, rank=rank)  # type: ignore[var-annotated, arg-type]
        stock = [part.tolist() for part in DataLoader(dataset, batch_size=micro, sampler=sampler)]  # type: ignore[arg-type]
        ours = [
            next(order.batches(0, step))[list(slot.positions)].tolist()
            for step in range(order.steps)
            for slot in arithmetic.deal(order.samples(step)).rank(rank)
        ]
        assert ours == stock


@given(batch=sizes, limit=st.integers(1, 12), data=st.integers(1, 8), part=st.integers(0, 39))
def test_even_shares_are_dealt_as_without_shares(batch: int, limit: int, data: int, part: int) -> None:
    data = min(data, batch)
    shares = tuple(batch // data + (rank < batch % data) for rank in range(data))
    plain, shared = BatchArithmetic(batch, limit, data), BatchArithmetic(batch, limit, data, shares)
    n = 1 + part % batch
    for rank in range(data):
        assert shared.deal(n).rank(rank) == plain.deal(n).rank(rank)
    for each in (plain, shared):
        largest = max(slot.samples for rank in range(data) for slot in each.deal(batch).rank(rank))
        assert each.largest_slot == largest and each.even() == plain.even()


def test_a_slow_rank_takes_fewer_samples() -> None:
    world = BatchArithmetic(8, 2, 2, (3, 5))
    rows = [world.deal(8).rank(rank) for rank in range(2)]
    assert [[slot.positions for slot in row] for row in rows] == [[(0,), (2,), (4,)], [(1, 3), (5, 6), (7,)]]
    assert [[slot.samples for slot in row] for row in rows] == [[1, 1, 1], [2, 2, 1]]


@pytest.mark.parametrize(("shares", "words"), [((3, 4), "are 7 samples"), ((8,), "over 1 ranks")])
def test_shares_that_do_not_add_up(shares: tuple[int, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        BatchArithmetic(8, 2, 2, shares)


def test_eight_samples_over_three_ranks() -> None:
    rows = [BatchArithmetic(8, 4, 3).deal(8).rank(rank) for rank in range(3)]
    assert [[slot.positions for slot in row] for row in rows] == [[(0, 3, 6)], [(1, 4, 7)], [(2, 5)]]
    assert [row[0].weight for row in rows] == [9 / 8, 9 / 8, 6 / 8]


@given(batch=sizes, limit=st.integers(1, 12), data=st.integers(1, 8), parts=st.lists(st.integers(1, 12), max_size=6))
def test_pipelines_have_micro_batches_of_one_size(batch: int, limit: int, data: int, parts: list[int]) -> None:
    shares = tuple(parts) or None
    batch, data = (sum(parts), len(parts)) if parts else (batch, min(data, batch))
    world = ColumnArithmetic(batch, limit, data, shares)
    rows = [world.deal(batch).rank(rank) for rank in range(data)]
    assert sorted(at for row in rows for slot in row for at in slot.positions) == list(range(batch))
    assert {slot.samples for row in rows for slot in row} == {world.largest_slot} and world.largest_slot <= limit
    assert {slot.weight for row in rows for slot in row} == {1.0}
    assert [len(row) for row in rows] == [world.micro_batches(rank) for rank in range(data)]
    assert world.accumulation == max(map(len, rows)) and world.slots == sum(map(len, rows))
    assert world.largest_share == world.accumulation * world.largest_slot
    even = BatchArithmetic(batch, limit, data, shares)
    if even.even():
        assert rows == [even.deal(batch).rank(rank) for rank in range(data)] and world.even()
    losses = torch.rand(batch, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))
    means = [sum(losses[list(slot.positions)].mean() for slot in row) / world.columns.mean for row in rows]
    torch.testing.assert_close(sum(means) / data, losses.mean(), rtol=1e-12, atol=0)


def test_a_pipeline_takes_full_batches() -> None:
    with pytest.raises(DataError, match=r"7 of 8 samples .* dataloader_drop_last"):
        ColumnArithmetic(8, 2, 2).deal(7)


def test_nearest_even_batch() -> None:
    assert (nearest_even(8, 2, 3), nearest_even(8, 2, 4), nearest_even(10, 2, 4)) == (6, 8, 8)


@given(batch=sizes, limit=st.integers(1, 6), data=st.integers(1, 6))
def test_nearest_even_batch_is_the_nearest(batch: int, limit: int, data: int) -> None:
    found = nearest_even(batch, limit, data)

    def fits(candidate: int) -> bool:
        return BatchArithmetic(candidate, limit, data).even()

    assert fits(found) and (found == batch) == fits(batch)
    distance = abs(found - batch)
    assert not any(fits(near) for near in range(max(1, batch - distance + 1), batch + distance))


@pytest.mark.parametrize(("batch", "limit", "data"), [(0, 1, 1), (8, -1, 1), (8, 2, 0), (8, 2.0, 1), (True, 1, 1)])
def test_sizes_must_be_positive_integers(batch: int, limit: int, data: int) -> None:
    with pytest.raises(DataError, match="give a positive integer"):
        BatchArithmetic(batch, limit, data)


def test_a_batch_outside_the_range_is_refused() -> None:
    arithmetic = BatchArithmetic(8, 2, 2)
    for samples in (0, 9):
        with pytest.raises(DataError, match="1 to train_batch_size = 8"):
            arithmetic.deal(samples)
    with pytest.raises(DataError, match="rank 2 is outside the data axis of size 2"):
        arithmetic.deal(8).rank(2)


@pytest.mark.parametrize(
    ("batch", "limit", "data", "shares", "words"),
    [
        (17, 4, 2, None, r"9 micro-batches of 1 sample, .* allows 4: .*divides train_batch_size \(17\), .* 16 or 20"),
        (64, 8, 2, (31, 33), r"33 micro-batches of 1 sample, .*divides every share \(31, 33\), .*Give shares that 8"),
        (17, 1, 2, None, ""),
        (17, 4, 17, None, ""),
        (18, 4, 2, None, ""),
    ],
)
def test_micro_batches_of_one_are_told_of(
    batch: int, limit: int, data: int, shares: tuple[int, ...] | None, words: str
) -> None:
    """Where nobody asked for them, and pipelines have something to share out."""
    notice = ColumnArithmetic(batch, limit, data, shares).notice
    assert re.search(words, notice) and bool(notice) == bool(words)
    assert BatchArithmetic(batch, limit, data, shares).notice == ""
