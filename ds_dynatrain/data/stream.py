"""Streams: data sets without an index, of which every rank reads all samples and trains its own.

Samples are numbered in the order of the stream, so a position in a stream is counted in global batches, as in any other
order, and no sample depends on the world. A rank reads the samples of a global batch when that batch begins, in its own
process or from one worker process, which reads ahead. A joining member or a resumed job reads the stream from its start
up to the position, and compares the last global batch before the position with a hash that is part of the position. The
states that streams themselves offer are not used: that of `datasets` leaves out the samples in a shuffle buffer, which
would then never be trained.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ds_dynatrain.data.order import Cursor, EpochOrder
from ds_dynatrain.errors import DataError

UNKNOWN = 2**62
"""Number that stands for the length of a stream whose end has not been read."""
KEPT_BATCHES = 2
"""Number of global batches that are kept once read, because a discarded batch is trained again."""


@dataclass(frozen=True)
class Rest(IterableDataset[Any]):
    """The samples of a stream from number `start` on."""

    samples: Any
    start: int

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.samples, "iter_from"):
            return iter(self.samples.iter_from(self.start))
        return itertools.islice(self.samples, self.start, None)


class SampleStream:
    """A stream as a data set, whose sample i is the i-th of the current pass. Only the newest samples can be read.

    samples: an object whose `__iter__` starts from the first sample each time. If it has a method `iter_from(number)`,
        which returns an iterator that begins with that sample, earlier samples are not read. If it has a method
        `set_epoch`, this method is called with the number of each pass.
    read: function that returns an iterator over a `Rest` (the stream from some sample on), read here or by a worker.

    Raises `DataError` for an iterator, which cannot be read from its start a second time.
    """

    def __init__(self, samples: Any, read: Callable[[Rest], Iterator[Any]] = iter) -> None:
        if iter(samples) is samples:
            raise DataError(
                f"{type(samples).__name__} is an iterator, which can be read only once; give an object whose __iter__ "
                "starts anew, such as a torch IterableDataset"
            )
        self.samples, self.read = samples, read
        self._epoch, self._at, self._is_at_end = -1, 0, False
        self._iterator: Iterator[Any] = iter(())
        self._read: dict[int, Any] = {}
        self._loaded: tuple[Cursor, int] | None = None
        """A position and the hash of the global batch before it, for the next read."""

    def __getitem__(self, number: int) -> Any:
        return self._read[number]

    def count(self, cursor: Cursor, size: int) -> int:
        """Read the global batch of `size` samples at `cursor`, and return how many samples the stream still had."""
        start = cursor.step * size
        if not self._has(cursor, start):
            self._go_to(cursor, start, size)
        if start == self._at:
            self._read_to(start + size)
            self._read = {at: one for at, one in self._read.items() if at >= start - (KEPT_BATCHES - 1) * size}
        return max(0, min(self._at - start, size))

    def _has(self, cursor: Cursor, start: int) -> bool:
        """Return whether sample `start` is available without going back: it is kept, or next, or past the end."""
        is_next = start == self._at or (self._is_at_end and start > self._at)
        return self._epoch == cursor.epoch and (is_next or start in self._read)

    def _read_to(self, stop: int) -> None:
        """Read up to sample `stop`. After an error of the stream, the next read starts at the stream's beginning."""
        epoch, self._epoch = self._epoch, -1
        found = list(itertools.islice(self._iterator, stop - self._at))
        self._epoch = epoch
        self._read.update(enumerate(found, self._at))
        self._at += len(found)
        self._is_at_end = self._at < stop

    def _go_to(self, cursor: Cursor, start: int, size: int) -> None:
        """Move to sample `start`, and check that the global batch before it has the expected hash."""
        before, name = max(0, start - size), type(self.samples).__name__
        self._epoch, self._is_at_end, self._read = -1, False, {}
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(cursor.epoch)
        self._iterator, self._at = self.read(Rest(self.samples, before)), before
        self._read_to(start)
        if start and self._at <= before:
            raise DataError(
                f"the stream {name} has no more than {before} samples, and global batch {cursor.step} of epoch "
                f"{cursor.epoch} begins at sample {start}; give the stream with which the position was counted"
            )
        known = self._loaded
        if known is not None and known[0] == cursor and known[1] != self._hash(before, start):
            raise DataError(
                f"the stream {name} has other samples before global batch {cursor.step} of epoch {cursor.epoch} than "
                "those that were trained; a stream must give the same samples in the same order whenever it is read"
            )
        self._epoch, self._loaded = cursor.epoch, None

    def hash_before(self, cursor: Cursor, size: int) -> int | None:
        """Return a hash of the global batch before `cursor`; None at the start of a pass, or if it was not kept."""
        start = cursor.step * size
        if self._loaded is not None and self._loaded[0] == cursor:
            return self._loaded[1]
        is_kept = self._epoch == cursor.epoch and start - size in self._read
        return self._hash(start - size, start) if is_kept else None

    def load(self, cursor: Cursor, hash_before: int | None, size: int) -> None:
        """Let the next read begin at `cursor`, after a check that the global batch before it has this hash."""
        if not self._has(cursor, cursor.step * size):
            self._epoch, self._loaded = -1, None if hash_before is None else (cursor, hash_before)

    def digest(self, cursor: Cursor, size: int) -> int:
        """Return a hash of the global batch at `cursor`."""
        start = cursor.step * size
        return self._hash(start, start + self.count(cursor, size))

    def _hash(self, start: int, stop: int) -> int:
        """Return a 63-bit hash of the samples from `start` to `stop`, as far as they have been read."""
        found = hashlib.blake2b(digest_size=8)
        for number in range(start, stop):
            for part in _parts(self._read.get(number)):
                found.update(part)
        return int.from_bytes(found.digest(), "big") >> 1


SCALARS = (bool, int, float, str, bytes, type(None))


def _parts(value: Any) -> Iterator[bytes]:
    """Yield bytes that describe a sample, for its hash. Objects of unknown types are described by their type only."""
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield from _parts(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        yield value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(_parts([name, inner]) for name, inner in value.items())
    elif isinstance(value, (list, tuple)) and not {*map(type, value)} <= {*SCALARS}:
        yield from itertools.chain.from_iterable(map(_parts, value))
    elif is_dataclass(value):
        yield from itertools.chain.from_iterable(_parts(getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, (*SCALARS, list, tuple, np.generic)):
        yield repr(value).encode()


class StreamOrder(EpochOrder):
    """The order of a stream, whose passes end where the stream ends."""

    def __init__(self, stream: SampleStream, train_batch_size: int, drop_last: bool) -> None:
        self.stream = stream
        super().__init__(UNKNOWN, train_batch_size, shuffle=False, drop_last=drop_last)

    @property
    def steps(self) -> int:
        """A number that no pass reaches, because the length of a stream is not known before its end is read."""
        return UNKNOWN // self.train_batch_size

    def __len__(self) -> int:
        raise TypeError("a stream has no length; give the number of steps to train, such as max_steps")

    def size(self, at: Cursor) -> int:
        """Read the global batch at `at`, and return its number of samples; 0 past the end of the stream."""
        found = self.stream.count(at, self.train_batch_size)
        if not found and at.step == 0:
            raise DataError(f"the stream {type(self.stream.samples).__name__} has no sample; give one with at least 1")
        return 0 if self.drop_last and found < self.train_batch_size else found

    def batches(self, epoch: int, step: int) -> Iterator[torch.Tensor]:
        """Yield the numbers of the samples of each global batch, from `step` to the end of the stream."""
        for number in itertools.count(step):
            start, found = number * self.train_batch_size, self.size(Cursor(epoch, number))
            if not found:
                return
            yield torch.arange(start, start + found)

    def digest(self, at: Cursor) -> int:
        """Return a hash of the samples in the global batch at `at`, which must be equal on all ranks."""
        return self.stream.digest(at, self.train_batch_size)

    def state_at(self, cursor: Cursor) -> dict[str, Any] | None:
        """Return a hash of the global batch before `cursor` in a dictionary; None if its samples are not known."""
        found = self.stream.hash_before(cursor, self.train_batch_size)
        return None if found is None else {"before": found}

    def load(self, cursor: Cursor, state: Mapping[str, Any] | None) -> None:
        """Continue at `cursor`. `state` is what `state_at` returned for this cursor."""
        self.stream.load(cursor, None if state is None else int(state["before"]), self.train_batch_size)
