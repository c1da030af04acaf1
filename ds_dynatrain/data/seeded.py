"""Samples whose random draws do not depend on who reads them, or on what was read before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_dynatrain.space.leaves import sample_seed


class Sample(NamedTuple):
    """A place in a data set, in a pass over it."""

    epoch: int
    place: int


class SeededSamples:
    """A data set that is read by `Sample`: torch's, numpy's and Python's generators are set before each one.

    What a `collate_fn` draws follows from the last sample of its micro-batch.
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


def in_epoch(epoch: int, indices: Iterable[list[int]]) -> Iterator[list[Sample]]:
    """Lists of indices as lists of samples."""
    return ([Sample(epoch, index) for index in each] for each in indices)
