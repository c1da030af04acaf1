"""Whether a record on the board was written by a member, and under this key: torch's store takes them from anybody."""

from __future__ import annotations

import hmac

import torch.distributed as td

from ds_dynatrain.errors import DynatrainError

TAG_BYTES = 32
"""HMAC-SHA256."""


class RecordForged(DynatrainError, td.DistError):  # noqa: N818
    """A record on the board that no member of the job has written. To whoever reads it, it is as if the store were
    gone: a decision that should lie there is unknown.
    """


class Seal:
    """What members of a job with a token put before each record.

    secret: that only they have, and that no other generation has, so no record of another one passes here.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def put(self, key: str, data: bytes) -> bytes:
        """A record with its tag."""
        return self._tag(key, data) + data

    def take(self, key: str, found: bytes) -> bytes:
        """The record without it; RecordForged if it is not the one of this key and of a member."""
        tag, data = found[:TAG_BYTES], found[TAG_BYTES:]
        if not hmac.compare_digest(self._tag(key, data), tag):
            raise RecordForged(
                f"the record {key!r} in the coordinator's store was not written by a member of this job: somebody else "
                "can reach that store and writes there; see docs/security.md"
            )
        return data

    def _tag(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
