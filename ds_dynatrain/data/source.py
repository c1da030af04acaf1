"""The source of a loader: a map-style data set and the settings to fetch its samples, taken from the user's arguments.

From a torch `DataLoader` the data set and settings are extracted. This package selects samples by global index itself,
so the loader's batch size and its own split over ranks are ignored. Data that cannot be sampled by global index is
refused with an error that names the reason.

If micro-batches are leaves (micro-batches of fixed size), random draws do not depend on the rank that reads a sample or
on earlier reads.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ds_dynatrain.data.order import EpochOrder, SampledOrder
from ds_dynatrain.data.stream import Rest, SampleStream, StreamOrder
from ds_dynatrain.data.workers import SharedEnd, WorkerStart, apart, without_collection
from ds_dynatrain.errors import DataError
from ds_dynatrain.space.leaves import sample_seed


class Sample(NamedTuple):
    """The index of a sample in its data set, and the epoch in which it is read."""

    epoch: int
    place: int


class SeededSamples:
    """A data set indexed by `Sample`. The generators of torch, numpy and Python are seeded before each sample.

    Random draws of a `collate_fn` are determined by the last sample of its micro-batch.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: Sample) -> Any:
        seed = sample_seed(self._seed, *sample)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self._dataset[sample.place]


STOCK_WORKERS = 2
"""Number of worker processes per loader if the user gives none. It equals DeepSpeed's default."""

READ_AHEAD = 64
"""Number of samples of a stream that a worker process reads ahead."""

MAP_STYLE = "give a data set with __getitem__ and __len__, or a stream with __iter__"
_FETCHED = (
    *("collate_fn", "num_workers", "pin_memory", "batch_size", "worker_init_fn", "prefetch_factor", "timeout"),
    "multiprocessing_context",
)
"""Attributes of a torch `DataLoader` that a `DataSource` takes over unchanged."""
logger = logging.getLogger("ds_dynatrain")
SAMPLERS = "leave it out (samples are dealt by global index in every world), or put its order into the data set itself"
BATCH_SAMPLERS = (
    "leave it out (samples are dealt by global index in every world); if it packs samples, make a data set whose item "
    "i is pack i, where packs = [*itertools.chain(*batch_sampler)] for axolotl's MultipackBatchSampler"
)
ONE_BY_ONE = "give the stream itself, with single samples, and batch_size to the DataLoader"
SEEDED = "give it generator=torch.Generator().manual_seed(SEED), the same on every rank"


@dataclass(frozen=True)
class DataSource:
    """A data set with all settings that determine its order and how its samples are fetched. Made by
    `DataSource.build`.

    `batch_size` is that of the torch `DataLoader` from which the source was made: evaluation uses it, training does
    not.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = STOCK_WORKERS
    shuffle: bool = True
    seed: int = 0
    reshuffle: bool = False
    drop_last: bool = False
    pin_memory: bool = False
    batch_size: int | None = None
    worker_init_fn: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    timeout: float = 0.0
    multiprocessing_context: Any = None
    seeds_samples: bool = False
    """Whether random generators are seeded before each sample is read, so that every rank makes the same draws for a
    sample."""
    sampler: DistributedSampler[Any] | None = field(default=None, repr=False, compare=False)
    """The user's sampler if its `set_epoch` determines the order; otherwise None."""
    drawn: Any = field(default=None, repr=False, compare=False)
    """The user's sampler if it draws the order from a generator of its own; otherwise None."""
    end: SharedEnd = field(default_factory=SharedEnd, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, bool) or not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise DataError(f"num_workers is {self.num_workers!r}; give an integer from 0 up")
        if self.is_stream and self.num_workers:
            self.dataset.read = self._read_ahead

    @classmethod
    def build(
        cls,
        data: object,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        reshuffle: bool | None = None,
        drop_last: bool | None = None,
        pin_memory: bool | None = None,
        seeds_samples: bool = False,
    ) -> DataSource:
        """Make a source from a map-style data set, a stream, or a torch `DataLoader` over one of these.

        An argument that is None is taken from the `DataLoader`; without a `DataLoader` it has stock DeepSpeed's
        default: two workers, shuffled with seed 0, the same permutation in every epoch. Memory is pinned only if the
        argument or the `DataLoader` requests it. A stream is read in its own order, by one worker at most. Raises
        `DataError` for a batch sampler, a sampler with an order of its own, a stream to be shuffled, or an object that
        is not a data set.
        """
        loader = data if isinstance(data, DataLoader) else None
        dataset = _data_set(data if loader is None else loader.dataset)
        found = {} if loader is None else {name: getattr(loader, name) for name in _FETCHED}
        if isinstance(dataset, SampleStream):
            found |= {"shuffle": False, "drop_last": loader is not None and loader.drop_last}
            found["num_workers"] = num_workers = _one_worker(found.get("num_workers", 0), num_workers)
            _refuse_to_order(shuffle, seeds_samples)
            if loader is not None and loader.batch_size is None:
                raise DataError(f"DataLoader(batch_size=None): each item of its stream is a whole batch; {ONE_BY_ONE}")
        elif loader is not None:
            found |= _sampling(loader, len(dataset))
        if reshuffle is not None:
            found["sampler"] = None
        given = {"collate_fn": collate_fn, "num_workers": num_workers, "shuffle": shuffle, "seed": seed}
        given |= {"reshuffle": reshuffle, "drop_last": drop_last, "pin_memory": pin_memory}
        found |= {name: value for name, value in given.items() if value is not None}
        return cls(dataset, seeds_samples=seeds_samples, **found)

    @property
    def is_stream(self) -> bool:
        """Whether samples have no index."""
        return isinstance(self.dataset, SampleStream)

    @property
    def sampler_epoch(self) -> int:
        """The epoch set on the user's sampler; 0 if there is no sampler."""
        return 0 if self.sampler is None else int(self.sampler.epoch)

    def order(self, train_batch_size: int) -> EpochOrder:
        """Return the order of the samples in an epoch, cut into global batches of `train_batch_size`."""
        if self.is_stream:
            return StreamOrder(self.dataset, train_batch_size, self.drop_last)
        if self.drawn is not None:
            return SampledOrder(self.drawn, train_batch_size, self.drop_last)
        length = len(self.dataset)
        follows = self.sampler is not None
        return EpochOrder(length, train_batch_size, self.shuffle, self.seed, self.reshuffle, self.drop_last, follows)

    def fetch(
        self, indices: Iterable[list[Any]], generator: torch.Generator | None, persistent: bool = False
    ) -> DataLoader[Any]:
        """Return a torch `DataLoader` that yields one collated batch for each list of indices, or for each list of
        `Sample`s if `seeds_samples` is set.

        generator: source of the workers' base seed; None for torch's default generator, as in stock torch.
        persistent: whether the workers live as long as the loader, rather than only as long as one of its iterators.
        """
        dataset: Any = SeededSamples(self.dataset, self.seed) if self.seeds_samples else self.dataset
        workers = 0 if self.is_stream else self.num_workers
        given: dict[str, Any] = {"batch_sampler": indices, "collate_fn": self.collate_fn, "pin_memory": self.pin_memory}
        return self._torch_loader(dataset, workers, generator, persistent_workers=persistent and workers > 0, **given)

    def _read_ahead(self, rest: Rest) -> Iterator[Any]:
        """Return an iterator over the rest of a stream, which a worker process reads ahead of time."""
        with without_collection():
            named = {"batch_size": None, "collate_fn": _same, "prefetch_factor": READ_AHEAD}
            return iter(self._torch_loader(rest, 1, apart(rest.start), **named))

    def _torch_loader(
        self, dataset: Any, workers: int, generator: torch.Generator | None, **named: Any
    ) -> DataLoader[Any]:
        """Return a torch `DataLoader` whose worker processes end when this process ends."""
        context = self.multiprocessing_context or torch.multiprocessing.get_context()
        method = context.get_start_method() if workers else None
        parent = os.getpid() if method in ("fork", "spawn") else None
        given: dict[str, Any] = {
            "num_workers": workers,
            "timeout": self.timeout if workers else 0.0,
            "worker_init_fn": WorkerStart(self.worker_init_fn, parent, self.end if method == "fork" else None),
            "multiprocessing_context": self.multiprocessing_context if workers else None,
            "prefetch_factor": self.prefetch_factor if workers else None,
        }
        return DataLoader(dataset, generator=generator, **{**given, **named})


def _same(sample: Any) -> Any:
    """Return the sample unchanged; a `collate_fn` for samples that are not collated."""
    return sample


def _kind(sampler: Any) -> type[Any]:
    """Return the class of a sampler. For torchdata's stateful samplers, return torch's class that draws the same."""
    kind, stock = type(sampler), {"BatchSampler": BatchSampler, "StatefulDistributedSampler": DistributedSampler}
    return stock.get(kind.__name__, kind) if kind.__module__.startswith("torchdata.") else kind


def _data_set(data: Any) -> Any:
    """Return a map-style data set as it is, and a `SampleStream` of anything else that can be iterated."""
    if not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return data
    if any(isinstance(stage, DataLoader) for stage in getattr(data, "pipeline", ())):
        raise DataError(f"{type(data).__name__}: each item is a whole batch of its own DataLoader; {ONE_BY_ONE}")
    if isinstance(data, IterableDataset) or hasattr(data, "__iter__"):
        return SampleStream(data)
    raise DataError(f"{type(data).__name__} is no data set (it has no __getitem__ and no __iter__); {MAP_STYLE}")


def _one_worker(of_loader: int, given: int | None) -> int:
    """Return 1 if the user requested workers for a stream, else 0. Several workers would change the samples' order."""
    asked = of_loader if given is None else given
    if asked > 1:
        logger.warning("a stream is read by one worker on each rank, in the stream's order, not by %d", asked)
    return min(asked, 1)


def _refuse_to_order(shuffle: bool | None, seeds_samples: bool) -> None:
    if shuffle:
        raise DataError("a stream cannot be shuffled here; shuffle it itself, as in `datasets`: stream.shuffle(seed=0)")
    if seeds_samples:
        raise DataError("an exact job reads samples by their index, and a stream has none; give a map-style data set")


def _sampling(loader: DataLoader[Any], length: int) -> dict[str, Any]:
    """Return the fields of a `DataSource` that reproduce a torch loader's order."""
    if getattr(loader, "next_iter_state", None) is not None:
        raise DataError(
            f"the {type(loader).__name__} has loaded a position, which is that of one rank and its workers; leave its "
            "load_state_dict out: the position in the data is in the job's own checkpoints (engine.save, engine.load)"
        )
    if loader.batch_size is None or _kind(loader.batch_sampler) is not BatchSampler:
        name = "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise DataError(f"the DataLoader has a batch sampler of its own ({name}), fixed to one world; {BATCH_SAMPLERS}")
    sampler: Any = loader.sampler
    kind = _kind(sampler)
    if kind is SequentialSampler:
        return {"shuffle": False, "drop_last": loader.drop_last}
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        seed = sampler.generator.initial_seed() if sampler.generator is not None else 0
        return {"shuffle": True, "seed": seed, "reshuffle": True, "drop_last": loader.drop_last}
    if kind is DistributedSampler and len(sampler.dataset) == length:
        drop_last = loader.drop_last or sampler.drop_last
        return {"shuffle": sampler.shuffle, "seed": sampler.seed, "drop_last": drop_last, "sampler": sampler}
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return {"drawn": sampler, "drop_last": loader.drop_last}
    if hasattr(sampler, "generator"):
        raise DataError(
            f"the DataLoader has a sampler of its own ({type(sampler).__name__}), which draws from torch's default "
            f"generator; {SEEDED}"
        )
    raise DataError(
        f"the DataLoader has a sampler of its own ({type(sampler).__name__}), whose order cannot be dealt by "
        f"global index; {SAMPLERS}"
    )
