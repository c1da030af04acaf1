"""Leaves: micro-batches that hold the same samples at every world size, and the random seeds used for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroStep:
    """One micro-step of a global batch, in which data rank r trains leaf `number * data + r`, if there is one.

    A leaf is a micro-batch of fixed size.
    number: index of the micro-step.
    data: size of the data axis.
    leaves: number of leaves in the global batch.
    """

    number: int
    data: int
    leaves: int

    def own(self) -> range:
        """Return the leaves trained in this micro-step, in rank order; ranks beyond the last leaf have none."""
        first = self.number * self.data
        return range(first, max(first, min(first + self.data, self.leaves)))


def leaf_seed(job_seed: int, stream: str, step: int, leaf: int, place: int = 0) -> int:
    """Return the seed of a random generator at a position in a leaf (a micro-batch of fixed size), from 0 to 2^63 - 1.

    stream: the name of the generator.
    place: the position in the leaf; 0 is the beginning.
    """
    return seed_of("leaf", job_seed, stream, step, leaf, place)


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed that random generators get before one sample is read, from 0 to 2^63 - 1.

    seed: the seed that also determines the order of samples.
    """
    return seed_of("sample", seed, epoch, sample)


def seed_of(*parts: object) -> int:
    """Return a seed derived from all parts, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
