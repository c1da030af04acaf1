"""The loader of evaluation data: no position, no boundary, and the same number of batches on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ds_dynatrain.data.host import Host
from ds_dynatrain.data.source import MapStyle, Source
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.errors import DataError


class EvaluationLoader:
    """Batches of an evaluation set, split over the world as it is when `iter()` is called; no sample counts twice.

    Sample i of the order goes to rank i % data. All ranks yield equally many batches, since a forward under ZeRO-3 is
    a collective; a rank that has run out repeats the first sample. Weigh by `samples`, the number of samples of its own
    in the last batch, 0 for a repeat:

        for batch in loader:
            total += engine(batch).item() * loader.samples
            count += loader.samples

    `batch_size` is the one given, else that of the torch `DataLoader` given, else the micro-batch size of the engine.
    `drop_last` is not applied: what it drops would depend on the world.
    """

    def __init__(self, source: Source, host: Host, batch_size: int | None = None, name: str = "evaluation") -> None:
        self.name = name
        self.source = source
        self.samples = 0
        """Samples of its own in the last batch yielded on this rank."""
        self.batch_size: int = batch_size or source.batch_size or host.batch.micro_batch_limit
        """The most samples in a batch of one rank."""
        self._host = host
        self._order = source.order(self.batch_size)

    @property
    def dataset(self) -> MapStyle:
        """The data set."""
        return self.source.dataset

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """The user's function that makes a batch of samples; None is torch's default."""
        return self.source.collate_fn

    @property
    def num_workers(self) -> int:
        """Worker processes on each member."""
        return self.source.num_workers

    def __len__(self) -> int:
        """Batches on each rank in the present world."""
        return math.ceil(self._order.length / (self._host.batch.data * self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, none where the others are not evaluating; `DataError` on an idle member."""
        if self._host.idle:
            raise DataError(
                "an idle member holds no state and cannot evaluate: iterate over an evaluation loader only where "
                "engine.idle is false"
            )
        with self._host.turn():
            if not self._host.begin_evaluation(self):
                return iter(())
        return self._batches(self._host.data_rank, self._host.batch.data, len(self))

    def _batches(self, rank: int, data: int, count: int) -> Iterator[Any]:
        permutation = self._order.permutation(0)
        mine = permutation[rank::data].tolist()
        own = [mine[start : start + self.batch_size] for start in range(0, count * self.batch_size, self.batch_size)]
        spare = permutation[:1].tolist()
        with self._host.turn(), without_collection():
            batches = iter(self.source.fetch([indices or spare for indices in own], None))
        for indices in own:
            with self._host.turn():
                batch = next(batches)
            self.samples = len(indices)
            yield batch
