"""What can be re-sampled by global index is taken apart, all else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ds_dynatrain.data import DataSource
from ds_dynatrain.errors import DataError

DATA = TensorDataset(torch.arange(10))


def first(samples: list[Any]) -> Any:
    return samples[0]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_data_set_is_read_as_stock_deepspeed_reads_it() -> None:
    source = DataSource.build(DATA)
    assert (source.num_workers, source.shuffle, source.seed, source.reshuffle, source.drop_last) == (
        2,
        True,
        0,
        False,
        False,
    )
    assert source.dataset is DATA and source.collate_fn is None and source.batch_size is None


def test_arguments_win() -> None:
    loader = DataLoader(DATA, batch_size=3, shuffle=True)
    source = DataSource.build(
        loader, collate_fn=first, num_workers=1, shuffle=False, seed=4, drop_last=True, pin_memory=False
    )
    assert (source.collate_fn, source.num_workers, source.shuffle, source.seed) == (first, 1, False, 4)
    assert source.drop_last and not source.pin_memory


def test_a_torch_loader_is_taken_apart() -> None:
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(DATA, 3, shuffle=True, collate_fn=first, num_workers=0, drop_last=True, generator=generator)
    source = DataSource.build(loader)
    assert source.dataset is DATA and source.collate_fn is first and source.num_workers == 0 and source.batch_size == 3
    assert (source.shuffle, source.seed, source.reshuffle, source.drop_last) == (True, 7, True, True)
    assert not DataSource.build(DataLoader(DATA)).shuffle
    assert DataSource.build(DataLoader(DATA, sampler=RandomSampler(DATA))).shuffle


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_taken_apart(shuffle: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, 1, shuffle=shuffle, seed=3)
    source = DataSource.build(DataLoader(DATA, 2, sampler=sampler))
    assert (source.shuffle, source.seed, source.reshuffle) == (shuffle, 3, False)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (iter([1, 2]), "is an iterator, which can be read only once"),
        (42, "no data set"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), "batch sampler of its own"),
        (DataLoader(DATA, batch_size=None), "batch sampler of its own"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=4)), "RandomSampler"),
        (DataLoader(DATA, sampler=[3, 1]), "sampler of its own"),
    ],
)
def test_what_cannot_be_dealt_again_is_refused(data: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        DataSource.build(data)


def test_a_batch_sampler_that_is_torchs_own_is_still_fixed_by_the_user() -> None:
    class Mine(BatchSampler):
        pass

    with pytest.raises(DataError, match="Mine"):
        DataSource.build(DataLoader(DATA, batch_sampler=Mine(SequentialSampler(DATA), 2, False)))


def test_workers_must_be_a_number() -> None:
    with pytest.raises(DataError, match="num_workers"):
        DataSource.build(DATA, num_workers=-1)
