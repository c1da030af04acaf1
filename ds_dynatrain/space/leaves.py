"""Leaves: micro-batches that hold the same samples in every world, and the seeds of random numbers drawn in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroStep:
    """One micro-step of a global batch: data rank r trains leaf number * data + r, or none from number `leaves` on."""

    number: int
    data: int
    leaves: int

    def own(self) -> range:
        """Return the leaves that are trained in this micro-step, by rank; a rank beyond the last leaf has none."""
        first = self.number * self.data
        return range(first, max(first, min(first + self.data, self.leaves)))


def leaf_seed(job_seed: int, stream: str, step: int, leaf: int, place: int = 0) -> int:
    """Return the seed of one generator before a leaf, from 0 to 2^63 - 1.

    stream: the generator's name. place: a position in the leaf; 0 is its beginning.
    """
    return seed_of("leaf", job_seed, stream, step, leaf, place)


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed of the generators while one sample is read, from 0 to 2^63 - 1; `seed` orders the samples."""
    return seed_of("sample", seed, epoch, sample)


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all parts, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
