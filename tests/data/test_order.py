"""The order of an epoch is the one of torch's `DistributedSampler`, cut without padding; positions survive a dict."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from ds_dynatrain.data import Cursor, EpochOrder
from ds_dynatrain.errors import DataError


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("reshuffle", "epoch"), [(False, 0), (False, 3), (True, 3)])
def test_permutation_is_that_of_the_distributed_sampler(shuffle: bool, reshuffle: bool, epoch: int) -> None:
    sampler = DistributedSampler(range(23), 1, 0, shuffle=shuffle, seed=5)  # type: ignore[var-annotated, arg-type]
    sampler.set_epoch(epoch if reshuffle else 0)
    order = EpochOrder(23, 4, shuffle=shuffle, seed=5, reshuffle=reshuffle)
    assert order.permutation(epoch).tolist() == list(sampler)


@settings(deadline=None)
@given(length=st.integers(1, 60), batch=st.integers(1, 20), drop_last=st.booleans(), epoch=st.integers(0, 3))
def test_global_batches_tile_the_permutation(length: int, batch: int, drop_last: bool, epoch: int) -> None:
    if drop_last and length < batch:
        with pytest.raises(DataError, match=f"no global batch is left of {length} samples"):
            EpochOrder(length, batch, drop_last=True)
        return
    order = EpochOrder(length, batch, reshuffle=True, drop_last=drop_last)
    batches = [next(order.batches(epoch, step)).tolist() for step in range(order.steps)]
    kept = length - length % batch if drop_last else length
    assert [sample for part in batches for sample in part] == order.permutation(epoch).tolist()[:kept]
    assert len(order) == kept
    assert [len(part) for part in batches] == [order.samples(step) for step in range(order.steps)]


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        EpochOrder(0, 4)
    with pytest.raises(DataError, match="step 3 is outside an epoch of 3"):
        EpochOrder(9, 4).samples(3)


def test_cursor() -> None:
    assert Cursor().advance().advance() == Cursor(0, 2)
    assert Cursor(1, 7).next_epoch() == Cursor(2, 0)
    assert Cursor.from_dict(Cursor(3, 4).to_dict()) == Cursor(3, 4)
    assert Cursor(0, 9) < Cursor(1, 0)
    with pytest.raises(DataError, match="integers epoch and step"):
        Cursor.from_dict({"epoch": 1})
    with pytest.raises(DataError, match="negative"):
        Cursor(0, -1)
