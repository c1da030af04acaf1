"""Leaves: parts of a global batch that are the same samples in every world, and who trains which.

A leaf is `micro_batch_limit` consecutive places of a global batch; the last one of a batch may be smaller. Leaves go to
the ranks of the data axis in turn: in micro-step m rank r trains leaf m * data + r. A rank for which there is none
borrows leaf 0 at weight 0, so that its collectives match, and nobody adds what it makes. A short batch has fewer.

The weight of a leaf is its share of the samples, so that

    gradient = sum over leaves of (samples / n) * (mean of the leaf's losses) = 1/n * sum over samples of their losses

and nothing else is divided or multiplied, in any world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynatrain.data.batch import BatchArithmetic, Slot, SlotTable
from ds_dynatrain.errors import DataError


@dataclass(frozen=True)
class Leaf(Slot):
    """A slot that holds one leaf. number: of the leaf that is trained, or borrowed; micro_step: of the global batch;
    leaves: that the global batch has; batch_samples: its samples."""

    number: int
    micro_step: int
    leaves: int
    batch_samples: int


@dataclass(frozen=True)
class LeafArithmetic(BatchArithmetic):
    """That of a job whose batches are cut into leaves of `micro_batch_limit` samples; `DataError` for shares, which
    would make leaves of another size, and for more ranks than a full batch has leaves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is not None:
            raise DataError(f"shares {self.shares}: leaves go to ranks in turn, whatever their speed; leave shares out")
        if self.data > self.leaves:
            raise DataError(
                f"train_batch_size {self.train_batch_size} in leaves of {self.micro_batch_limit} samples is "
                f"{self.leaves} leaves, and data={self.data} ranks would not each have one; use at most {self.leaves} "
                "data ranks"
            )

    @property
    def leaves(self) -> int:
        """Of a full global batch."""
        return self.leaves_of(self.train_batch_size)

    def leaves_of(self, samples: int) -> int:
        """Of a global batch of so many."""
        return math.ceil(samples / self.micro_batch_limit)

    @property
    def accumulation(self) -> int:
        """Micro-steps of a global batch, of a short one too."""
        return math.ceil(self.leaves / self.data)

    @property
    def largest_slot(self) -> int:
        """Samples of a leaf, but for the last one of a batch."""
        return min(self.micro_batch_limit, self.train_batch_size)

    @property
    def largest_share(self) -> int:
        """Samples of rank 0."""
        return len(self.positions(0, self.train_batch_size))

    def even(self, samples: int | None = None) -> bool:
        """Whether no rank borrows a leaf, and all leaves have the same size."""
        count = self.train_batch_size if samples is None else samples
        return count % self.largest_slot == 0 and self.leaves_of(count) == self.slots

    def positions(self, rank: int, samples: int) -> Sequence[int]:
        """The places of a rank's own samples, leaf by leaf."""
        own = range(rank, self.leaves_of(samples), self.data)
        return [place for number in own for place in self.places(number, samples)]

    def places(self, number: int, samples: int) -> range:
        """The places of a leaf in a global batch of so many samples."""
        start = number * self.micro_batch_limit
        return range(start, min(start + self.micro_batch_limit, samples))

    def deal(self, samples: int) -> LeafTable:
        """The leaves of a global batch of `samples`, 1 to train_batch_size of them; `DataError` outside that range."""
        super().deal(samples)
        return LeafTable(self, samples)


@dataclass(frozen=True)
class LeafTable(SlotTable):
    """Who trains which leaf of one global batch."""

    batch: LeafArithmetic

    def rank(self, rank: int) -> tuple[Leaf, ...]:
        """Those of one rank, by micro-step."""
        self._check(rank)
        return tuple(self._leaf(step, rank) for step in range(self.batch.accumulation))

    def _leaf(self, step: int, rank: int) -> Leaf:
        count, number = self.batch.leaves_of(self.samples), step * self.batch.data + rank
        is_own = number < count
        places = self.batch.places(number if is_own else 0, self.samples)
        own = len(places) if is_own else 0
        return Leaf(
            tuple(places),
            own,
            own / self.samples,
            number if is_own else 0,
            step,
            leaves=count,
            batch_samples=self.samples,
        )
