"""How the samples of one global batch are assigned to ranks and micro-batches, and the micro-batches' weights.

The global batch has the same size in every world. Sample positions are assigned to the ranks of the data axis in turn,
the way torch's `DistributedSampler` does it; a rank whose share is full is skipped in further rounds. A rank cuts its
samples into consecutive micro-batches, one per accumulation step. One (rank, accumulation step) is a *slot*. If the
sizes do not divide evenly, slots hold unequal numbers of samples. The weight of a slot makes the accumulated gradient
exactly that of the mean over all samples of the global batch:

    gradient = 1/data * sum over ranks of (1/accumulation * sum over slots of weight * mean loss of the slot)
             = 1/slots * sum over slots of (samples * slots / n) * (sum of the slot's losses / samples)
             = 1/n * sum over samples of their losses

A leaf is a micro-batch of fixed size that has the same samples in every world: `micro_batch_limit` consecutive
positions of a global batch; the last one of a batch may be smaller. Leaves are assigned to the ranks of the data axis
in turn: in micro-step m rank r trains leaf m * data + r. If there is no such leaf, the rank borrows leaf 0: it trains
leaf 0 with weight 0, only to take part in the collectives of the other ranks. A short batch has fewer leaves.

The weight of a leaf is its fraction of the samples, so that

    gradient = sum over leaves of (samples / n) * (mean of the leaf's losses) = 1/n * sum over samples of their losses

and no further division or multiplication is needed in any world.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_dynatrain.errors import DataError
from ds_dynatrain.space.columns import Columns


@dataclass(frozen=True)
class Slot:
    """One micro-batch of one rank: its samples, and the weight of its loss.

    positions: positions in the global batch, from 0 to n - 1.
    samples: how many of these positions count: all, or 0 for a slot that only repeats the sample at position 0 so that
        its collectives match those of the other ranks.
    weight: the factor by which to multiply the mean loss.
    """

    positions: tuple[int, ...]
    samples: int
    weight: float

    @property
    def is_borrowed(self) -> bool:
        """Whether the slot (micro-batch) only repeats another rank's sample."""
        return self.samples == 0


@dataclass(frozen=True)
class BatchArithmetic:
    """The sizes of batches in one world, and the numbers derived from them.

    train_batch_size: samples per global batch.
    micro_batch_limit: the most samples per micro-batch.
    data: size of the data axis.
    shares: samples of a full global batch that each data rank takes; None for shares as equal as possible.

    Raises `DataError` if a size is not a positive integer, if the number of shares differs from the number of ranks, or
    if the shares do not add up to the batch.
    """

    train_batch_size: int
    micro_batch_limit: int
    data: int
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_batch_limit", "data"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DataError(f"{name} is {value!r}; give a positive integer")
        if self.shares is not None and (len(self.shares) != self.data or sum(self.shares) != self.train_batch_size):
            raise DataError(
                f"shares {self.shares} are {sum(self.shares)} samples over {len(self.shares)} ranks, and "
                f"train_batch_size {self.train_batch_size} goes over data={self.data}; give {self.data} shares that "
                f"are {self.train_batch_size} together"
            )

    @property
    def largest_share(self) -> int:
        """Number of samples of a full global batch that the rank with the largest share takes."""
        return math.ceil(self.train_batch_size / self.data) if self._shares is None else max(self._shares)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches that each rank runs per global batch: as many as the largest share needs."""
        return math.ceil(self.largest_share / self.micro_batch_limit)

    @property
    def largest_slot(self) -> int:
        """Number of samples in the largest micro-batch."""
        return math.ceil(self.largest_share / self.accumulation)

    @property
    def slots(self) -> int:
        """Number of micro-batches per global batch over all ranks: data * accumulation."""
        return self.data * self.accumulation

    @property
    def notice(self) -> str:
        """Explanation of why micro-batches are smaller than expected, and advice; "" if they are not smaller."""
        return ""

    def micro_batches(self, rank: int) -> int:
        """Return the number of micro-batches of one rank per global batch: `accumulation`."""
        return self.accumulation

    def even(self) -> bool:
        """Return whether all micro-batches of a full global batch have the same size, and therefore weight 1."""
        if self.shares is None:
            return self.train_batch_size % self.slots == 0
        return len(set(self.shares)) == 1 and self.shares[0] % self.accumulation == 0

    def positions(self, rank: int, samples: int) -> Sequence[int]:
        """Return the positions of a rank's samples in a global batch of `samples` samples, in the order in which it
        trains them.
        """
        return range(rank, samples, self.data) if self._shares is None else _in_turn(self._shares, rank, samples)

    @property
    def _shares(self) -> tuple[int, ...] | None:
        """Samples of a full global batch that each rank takes; None if ranks take them in turn."""
        return self.shares

    def deal(self, samples: int) -> SlotTable:
        """Assign the samples of a global batch to the slots (micro-batches) of all ranks.

        samples: size of the global batch. Raises DataError unless the size is from 1 to train_batch_size.
        """
        if not 1 <= samples <= self.train_batch_size:
            raise DataError(
                f"a global batch of {samples} samples cannot be dealt; give 1 to train_batch_size = "
                f"{self.train_batch_size} samples"
            )
        return SlotTable(self, samples)

    def row(self, rank: int, samples: int) -> tuple[Slot, ...]:
        """Return the slots (micro-batches) of a rank in a global batch of `samples` samples, a size that `deal`
        accepts."""
        mine, count, found = self.positions(rank, samples), self.micro_batches(rank), list[Slot]()
        small, larger = divmod(len(mine), count)
        starts = [index * small + min(index, larger) for index in range(count + 1)]
        for start, stop in itertools.pairwise(starts):
            own = tuple(mine[start:stop])
            found.append(Slot(own, len(own), len(own) * self.slots / samples) if own else Slot((0,), 0, 0.0))
        return tuple(found)


@dataclass(frozen=True)
class SlotTable:
    """The slots (micro-batches) of one global batch of `samples` samples. Each rank's slots are computed on request."""

    batch: BatchArithmetic
    samples: int

    def rank(self, rank: int) -> tuple[Slot, ...]:
        """Return the slots of one rank of the data axis, in training order. Raises DataError for a rank outside the
        axis."""
        if not 0 <= rank < self.batch.data:
            raise DataError(
                f"rank {rank} is outside the data axis of size {self.batch.data}; give 0 to {self.batch.data - 1}"
            )
        return self.batch.row(rank, self.samples)


@dataclass(frozen=True)
class ColumnArithmetic(BatchArithmetic):
    """Batch arithmetic of pipelines: all micro-batches have the same size, but data ranks may have different numbers of
    micro-batches (see `Columns`).

    Every micro-batch therefore has weight 1. A rank divides its sum of gradients by `columns.mean` instead of by
    `accumulation`, which is the largest number of micro-batches of any rank.
    """

    @cached_property
    def columns(self) -> Columns:
        """Micro-batch size, and the number of micro-batches of each data rank."""
        return Columns.of(self.train_batch_size, self.micro_batch_limit, self.data, self.shares)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per global batch on the rank that has the most."""
        return self.columns.longest

    @property
    def largest_slot(self) -> int:
        """Number of samples in every micro-batch."""
        return self.columns.size

    @property
    def slots(self) -> int:
        """Number of micro-batches per global batch, over all ranks."""
        return self.columns.total

    @property
    def notice(self) -> str:
        """Explanation if only micro-batches of one sample divide the batch evenly, as with a prime batch size;
        otherwise ""."""
        limit = min(self.micro_batch_limit, self.largest_share)
        if self.columns.size > 1 or limit == 1:
            return ""
        parts, given = "train_batch_size", f"{self.train_batch_size}"
        if self.shares is not None:
            parts, given = "every share", f"{', '.join(map(str, self.shares))}"
        near = self.train_batch_size // limit * limit
        instead = f"a train_batch_size of {near} or {near + limit}" if self.shares is None else "shares"
        return (
            f"data={self.data}: a pipeline runs {self.accumulation} micro-batches of 1 sample, where "
            f"train_micro_batch_size_per_gpu allows {self.micro_batch_limit}: micro-batches have one size, which "
            f"divides {parts} ({given}), and from 2 to {limit} nothing does. Give {instead} that {limit} divides, or "
            "another number of pipelines"
        )

    def micro_batches(self, rank: int) -> int:
        """Return the number of micro-batches that one data rank runs per global batch."""
        return self.columns.counts[rank]

    def even(self) -> bool:
        """Return whether all ranks have the same number of micro-batches."""
        return self.columns.is_even

    @property
    def _shares(self) -> tuple[int, ...] | None:
        """Samples of a full global batch that each rank takes; None if ranks take them in turn."""
        return None if self.columns.is_even else self.columns.shares

    def deal(self, samples: int) -> SlotTable:
        """Assign the samples of a full global batch to the slots (micro-batches) of all ranks.

        Raises DataError for a shorter batch, whose micro-batches would differ in size.
        """
        if samples != self.train_batch_size:
            raise DataError(
                f"a global batch of {samples} of {self.train_batch_size} samples cannot be dealt to pipelines, which "
                "send buffers of one size; set dataloader_drop_last to true"
            )
        return SlotTable(self, samples)


def _in_turn(shares: Sequence[int], rank: int, samples: int) -> list[int]:
    """Return the positions of a rank's samples if ranks take samples in turn, skipping ranks with a full share."""
    places = (
        sum(min(share, each) for share in shares) + sum(share > each for share in shares[:rank])
        for each in range(shares[rank])
    )
    return [place for place in places if place < samples]


def nearest_even(train_batch_size: int, micro_batch_limit: int, data: int) -> int:
    """Return the batch size nearest to the given one that divides evenly among `data` ranks; of two equally near sizes,
    the smaller one.

    A size of data * micro_batch_limit samples always divides evenly, so the search ends.
    """
    sizes = (train_batch_size + way * far for far in itertools.count() for way in (-1, 1))
    return next(size for size in sizes if size > 0 and BatchArithmetic(size, micro_batch_limit, data).even())


@dataclass(frozen=True)
class Leaf(Slot):
    """A slot (one micro-batch of one rank) that holds one leaf, a micro-batch of fixed size.

    number: index of the leaf that is trained, or repeated with weight 0.
    micro_step: index of the leaf's micro-step in the global batch.
    leaves: number of leaves in the global batch.
    batch_samples: number of samples in the global batch.
    """

    number: int
    micro_step: int
    leaves: int
    batch_samples: int


@dataclass(frozen=True)
class LeafArithmetic(BatchArithmetic):
    """Batch arithmetic of a job whose batches are cut into leaves (micro-batches of fixed size) of `micro_batch_limit`
    samples.

    Raises `DataError` if shares are given, which would make leaves of a different size, or if there are more ranks than
    leaves in a full batch.
    """

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
        """Number of leaves (micro-batches of fixed size) in a full global batch."""
        return self.leaves_of(self.train_batch_size)

    def leaves_of(self, samples: int) -> int:
        """Return the number of leaves (micro-batches of fixed size) in a global batch of `samples` samples."""
        return math.ceil(samples / self.micro_batch_limit)

    @property
    def accumulation(self) -> int:
        """Number of micro-steps in every global batch, short ones included."""
        return math.ceil(self.leaves / self.data)

    @property
    def largest_slot(self) -> int:
        """Number of samples in a leaf (a micro-batch of fixed size); the last leaf of a batch may have fewer."""
        return min(self.micro_batch_limit, self.train_batch_size)

    @property
    def largest_share(self) -> int:
        """Number of samples of a full global batch that rank 0 takes; no rank takes more."""
        return len(self.positions(0, self.train_batch_size))

    def even(self) -> bool:
        """Return whether all leaves of a full global batch have the same size, and each rank has its own in each
        micro-step."""
        return self.train_batch_size % self.largest_slot == 0 and self.leaves == self.slots

    def positions(self, rank: int, samples: int) -> Sequence[int]:
        """Return the positions of a rank's own samples in a global batch, one leaf (micro-batch) after the other."""
        own = range(rank, self.leaves_of(samples), self.data)
        return [place for number in own for place in self.places(number, samples)]

    def places(self, number: int, samples: int) -> range:
        """Return the positions of the samples of leaf (micro-batch) `number` in a global batch of `samples` samples."""
        start = number * self.micro_batch_limit
        return range(start, min(start + self.micro_batch_limit, samples))

    def row(self, rank: int, samples: int) -> tuple[Leaf, ...]:
        """Return the leaves that one rank trains, one for each micro-step, including leaves repeated with weight 0."""
        count, found = self.leaves_of(samples), list[Leaf]()
        for step in range(self.accumulation):
            number = step * self.data + rank
            is_own = number < count
            number = number if is_own else 0
            places = self.places(number, samples)
            own = len(places) if is_own else 0
            found.append(Leaf(tuple(places), own, own / samples, number, step, leaves=count, batch_samples=samples))
        return tuple(found)
