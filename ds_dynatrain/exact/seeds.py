"""What random generators are set to, by what is computed and not by who computes it."""

from __future__ import annotations

import hashlib


def leaf_seed(job_seed: int, stream: str, step: int, leaf: int, place: int = 0) -> int:
    """That of one generator before a leaf: 0 to 2^63 - 1. stream: its name; place: in the leaf, 0 is its beginning."""
    return _seed("leaf", job_seed, stream, step, leaf, place)


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """That of the generators while one sample is read: 0 to 2^63 - 1. seed: of the order of samples."""
    return _seed("sample", seed, epoch, sample)


def _seed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
