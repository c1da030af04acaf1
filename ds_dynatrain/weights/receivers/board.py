"""Records by which a trainer and its receiving ranks coordinate, in a key-value store on the first receiving rank.

Records are JSON and arrays of numbers; nothing is unpickled. The first receiving rank removes records of earlier links
and versions, except the final decision on each version (its verdict). The keys:

| key | written by | holds |
|---|---|---|
| `receiver/R` | receiving rank R, when it starts | number of receiving ranks, and the dimensions that they cut |
| `state/R` | receiving rank R | its version and the link that it is on (0: none) |
| `link/L` | the trainer's rank 0 | a trainer world's connections: its size, tensors, size of buckets |
| `here/L/G` | rank G of a link | that it is about to connect |
| `offer` | the trainer's rank 0 | the newest update: version, link, and the version that it builds on |
| `ready/V/R` | receiving rank R | that it waits for the values of version V |
| `proof/V` | the trainer's rank 0 | the digest of each tensor of version V |
| `held/V/R` | receiving rank R | the digests of what it has received |
| `verdict/V` | the first rank that decides | "" if version V becomes visible; else why it is discarded |
| `shown/V/R` | receiving rank R | that version V is its present one |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ds_dynatrain.checkpoint.extents import name_of, named
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.store import open_store, serve_store
from ds_dynatrain.errors import TransferError
from ds_dynatrain.membership.control import Control, Seal
from ds_dynatrain.weights.outputs import batches

PREFIX = "dynatrain-weights"


def serve(address: str) -> tuple[TCPStore, str]:
    """Start a key-value store that listens at HOST:PORT, and return it with its address. Port 0 selects a free port."""
    place = Address.parse(address)
    listener = listen(place, is_guarded=True)  # with a token, all records in the store are signed
    place = Address(place.host, listener.getsockname()[1])
    return serve_store(place.host, listener), str(place)


def board_at(address: str, rank: int, seconds: float, token: str | None) -> Control:
    """Return the receivers' board (their key-value store) at an address. Raises TransferError if it does not answer
    within `seconds`.
    """
    place = Address.parse(address)
    try:
        store = open_store(place.host, place.port, PREFIX, seconds)
    except td.DistError as error:
        raise TransferError(
            f"no receivers answer at {address} within {seconds:g} s ({error}): start the rank 0 of GroupReceiver there"
        ) from error
    return Control(store, "board", rank, seconds, seal=None if token is None else Seal(token.encode()))


class LinkConnection:
    """A gloo group of all ranks of a link: first the trainer's ranks, then the receiving ranks.

    The constructor raises MemberMissing, with the missing ranks, if not all ranks connect in time.

    trainers: the number of the trainer's ranks.
    stop: called while waiting; may raise to end the wait.
    """

    def __init__(
        self, board: Control, link: int, rank: int, trainers: int, receivers: int, stop: Callable[[], None]
    ) -> None:
        size = trainers + receivers
        board.post(f"here/{link}/{rank}", 1)
        board.gather(f"here/{link}", range(size), f"link {link} between trainer and receivers", stop=stop)
        self.trainers, self.seconds, self._sockets = trainers, board.timeout_seconds, WorldSockets()
        with self._sockets.building():
            store = PrefixStore(f"gloo/{link}", board.store)
            self._group: Any = td.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=self.seconds))

    def send(self, values: torch.Tensor, rank: int, what: str) -> Callable[[], None]:
        """Start sending flat values in host memory to a rank. Return a function that waits until they are sent.

        Both raise TransferError, naming the rank, if sending fails or takes too long.

        what: a description of the values, for messages.
        """
        with self._naming(rank, what):
            return partial(self._finish, self._group.send([values], rank, 0), rank, what)

    def receive(self, values: torch.Tensor, rank: int, what: str) -> Callable[[], None]:
        """Start receiving flat values into host memory from a rank. Return value and errors are those of `send`."""
        with self._naming(rank, what):
            return partial(self._finish, self._group.recv([values], rank, 0), rank, what)

    def _finish(self, work: Any, rank: int, what: str) -> None:
        with self._naming(rank, what):
            work.wait(timedelta(seconds=self.seconds))

    @contextmanager
    def _naming(self, rank: int, what: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_trainer, waited = rank < self.trainers, time.monotonic() - begin
            peer = f"the trainer's rank {rank}" if is_trainer else f"receiving rank {rank - self.trainers}"
            raise TransferError(
                f"{what}: {peer} failed or went away, after {waited:.1f} of {self.seconds:g} s"
            ) from error

    def close(self) -> None:
        """Close the connections. Calls of other ranks that wait for this rank raise at once."""
        with suppress(OSError):
            self._sockets.abort()


@dataclass(frozen=True)
class TargetTensor:
    """A tensor that receivers get: its name, element type and full shape, and the number of its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int


def targets_of(rows: Sequence[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> list[TargetTensor]:
    """Assign tensors to buckets: consecutive tensors of one type, up to `bucket_bytes` unless a tensor is larger.

    rows: (name, element type, shape) of each tensor.
    """

    def nbytes(row: tuple[str, str, Sequence[int]]) -> int:
        return torch.Size(row[2]).numel() * named(row[1]).itemsize

    of_type = (same for _, same in groupby(rows, lambda row: row[1]))
    buckets = enumerate(chain.from_iterable(batches(same, nbytes, bucket_bytes) for same in of_type))
    return [TargetTensor(name, named(kind), tuple(shape), at) for at, bucket in buckets for name, kind, shape in bucket]


def rows_to_post(metadata: Sequence[Any]) -> list[tuple[str, str, list[int]]]:
    """Return the metadata of a source in the form that `targets_of` takes."""
    return [(each.name, name_of(each.dtype), list(each.shape)) for each in metadata]
