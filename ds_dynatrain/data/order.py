"""The order of the samples of an epoch, and how it is cut into global batches.

The permutation is the one in which stock DeepSpeed's loader trains: torch's `DistributedSampler(seed=0, shuffle=True)`.
DeepSpeed never calls `set_epoch` on that sampler, so every epoch has the same permutation, unless `reshuffle` is set or
the script calls `set_epoch` on a sampler of its own. DeepSpeed's pipeline engine reads `training_data` with
`shuffle=False`: in the data set's own order. Unlike in DeepSpeed, the end of an epoch is not padded with repeated
samples: a short last batch is a step of its own, or is dropped.

The position of training is counted in global batches, so it is the same in every world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

import torch

from ds_dynatrain.errors import DataError


@dataclass(frozen=True, order=True)
class Cursor:
    """A position in the data: the first global batch not returned in full, `step` of epoch `epoch`, both counted from
    0.

    `step` may equal the number of global batches of an epoch: all were returned, but the loop over them has not ended
    yet.
    """

    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise DataError(
                f"a position in the data cannot be negative: epoch {self.epoch}, step {self.step}; give what "
                "state_dict() returned"
            )

    def advance(self) -> Cursor:
        """Return the cursor of the next global batch of the same epoch."""
        return Cursor(self.epoch, self.step + 1)

    def next_epoch(self) -> Cursor:
        """Return the cursor of the first global batch of the next epoch."""
        return Cursor(self.epoch + 1, 0)

    def to_dict(self) -> dict[str, int]:
        """Return the cursor as plain integers, for a checkpoint or a joining member."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that `to_dict` wrote. Raises `DataError` if a field is missing or is not an integer."""
        try:
            return cls(index(state["epoch"]), index(state["step"]))
        except (KeyError, TypeError):
            raise DataError(
                f"a position in the data needs the integers epoch and step, not {dict(state)}; give what state_dict() "
                "returned"
            ) from None


@dataclass(frozen=True)
class EpochOrder:
    """The rule that determines which samples are in which global batch. No part of it depends on the world.

    Raises `DataError` if an epoch would have no global batch.
    """

    length: int
    train_batch_size: int
    shuffle: bool = True
    seed: int = 0
    reshuffle: bool = False
    drop_last: bool = False
    follows_sampler: bool = False
    """Whether the `epoch` given to methods is the one set on the user's sampler. If so, it determines the order, the
    same way as with `reshuffle`."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(
                "the data set is empty (length 0): there is no sample to train on; give one with at least 1 sample"
            )
        if self.train_batch_size < 1:
            raise DataError(f"train_batch_size is {self.train_batch_size}; give at least 1")
        if not self.steps:
            raise DataError(
                f"no global batch is left of {self.length} samples: train_batch_size is {self.train_batch_size} and "
                "drop_last drops a short batch; use a smaller train_batch_size, or dataloader_drop_last = false"
            )

    @property
    def steps(self) -> int:
        """Number of global batches per epoch."""
        full, rest = divmod(self.length, self.train_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def __len__(self) -> int:
        """Return the number of samples per epoch, not counting those that `drop_last` drops."""
        return min(self.length, self.steps * self.train_batch_size)

    def samples(self, step: int) -> int:
        """Return the number of samples in global batch `step` of an epoch. Raises `DataError` if the epoch has no such
        step."""
        if not 0 <= step < self.steps:
            raise DataError(
                f"step {step} is outside an epoch of {self.steps} global batches; give 0 to {self.steps - 1}"
            )
        return min(self.train_batch_size, self.length - step * self.train_batch_size)

    def size(self, at: Cursor) -> int:
        """Return the number of samples in the global batch at `at`; 0 past the end of its epoch."""
        return self.samples(at.step) if at.step < self.steps else 0

    def permutation(self, epoch: int) -> torch.Tensor:
        """Return the data set's indices in training order: an int64 tensor of shape (length,) on the CPU."""
        if not self.shuffle:
            return torch.arange(self.length, dtype=torch.int64, device="cpu")
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed + (epoch if self.reshuffle or self.follows_sampler else 0))
        return torch.randperm(self.length, generator=generator, dtype=torch.int64, device="cpu")

    def batches(self, epoch: int, step: int) -> Iterator[torch.Tensor]:
        """Yield the data set's indices of each global batch, from `step` to the end of the epoch."""
        permutation = self.permutation(epoch)
        for number in range(step, self.steps):
            start = number * self.train_batch_size
            yield permutation[start : start + self.samples(number)]

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return an empty dictionary, because the order of an epoch follows from its number alone."""
        return {}

    def digest(self, at: Cursor) -> int | None:
        """Return a 63-bit hash of the order at `at`; None if the order cannot differ between ranks."""
        return None

    def state_at(self, cursor: Cursor) -> dict[str, Any] | None:
        """Return what a position needs besides the cursor, as plain JSON; None if the cursor alone determines the
        order."""
        return None

    def load(self, cursor: Cursor, state: Mapping[str, Any] | None) -> None:
        """Continue at `cursor`. `state` is what `state_at` returned for this cursor."""

    def describe(self) -> dict[str, Any]:
        """Return all fields except `follows_sampler`. It is not needed, because a position itself records the sampler's
        epoch."""
        described = asdict(self)
        del described["follows_sampler"]
        return described


class SampledOrder(EpochOrder):
    """The order that a torch sampler draws from its own generator, which is seeded with (its seed + k) in epoch k."""

    def __init__(self, sampler: Any, train_batch_size: int, drop_last: bool) -> None:
        """Make the order of `sampler`, whose `generator` has the same initial seed on every rank."""
        self.sampler = sampler
        seed = sampler.generator.initial_seed()
        super().__init__(len(sampler), train_batch_size, seed=seed, reshuffle=True, drop_last=drop_last)

    def permutation(self, epoch: int) -> torch.Tensor:
        """Return the indices that the sampler draws in an epoch. Raises DataError if their number has changed."""
        own, self.sampler.generator = self.sampler.generator, torch.Generator().manual_seed(self.seed + epoch)
        try:
            found = torch.tensor(list(self.sampler), dtype=torch.int64, device="cpu")
        finally:
            self.sampler.generator = own  # other loaders read the initial seed of the sampler's own generator
        if len(found) != self.length:
            raise DataError(
                f"{type(self.sampler).__name__} drew {len(found)} samples in epoch {epoch}, and its length is "
                f"{self.length}; a sampler must draw as many samples in every epoch"
            )
        return found

    def digest(self, at: Cursor) -> int:
        """Return a hash of the order of the epoch of `at`, which must be the same on every rank."""
        drawn = self.permutation(at.epoch).numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(drawn, digest_size=8).digest(), "big") >> 1

    def describe(self) -> dict[str, Any]:
        """Return all fields of the order, and the name of the sampler's class."""
        return {**super().describe(), "sampler": type(self.sampler).__name__}
