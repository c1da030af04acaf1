"""One member's files: its extents, each a record batch of a file for its element type.

Values are written from where they lie in memory; what is not in one piece there, or not in host memory, goes through a
small chunk. The digest of each is taken on the way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.checkpoint.extents import Extent, chunks, digest_of
from ds_dynatrain.checkpoint.manifest import Row
from ds_dynatrain.space import WEIGHT

CHUNK_BYTES = 1 << 20
"""Written and weighed at once, while it is in the cache."""
LARGE_BYTES = 32 << 20
"""Larger files are brought to the disk while they are written."""
FLUSH_SECONDS = 0.02
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Share:
    """An extent that this member writes. matrix: its values, a run a row. master: those of a weight's master."""

    tensor: str
    kind: str
    shape: tuple[int, ...]
    extent: Extent
    matrix: torch.Tensor
    master: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.matrix.numel() * self.matrix.element_size()

    def is_cast(self, chunk_bytes: int) -> bool:
        """Whether the values are those of the master in another type, bit by bit: nothing of them is stored then."""
        weight, master = self.matrix, self.master
        if master is None or weight.data_ptr() == master.data_ptr():
            return master is not None
        most = max(1, chunk_bytes // master.element_size())
        pairs = zip(chunks(weight, most), chunks(master, most), strict=True)
        return all(_same_bits(held, of.to(held.dtype)) for (_, held), (_, of) in pairs)


def write_shares(folder: Path, number: int, shares: Iterable[Share], chunk_bytes: int = CHUNK_BYTES) -> list[Row]:
    """Write the files of member `number` of the world, down to the disk; the rows of the manifest about them.

    OSError as the system gives it, such as for a disk that is full.
    """
    by_type: dict[torch.dtype, list[Share]] = {}
    rows: list[Row] = []
    for share in shares:
        if share.is_cast(chunk_bytes):
            rows.append(_row(share, "", 0, _digest(share, share.matrix.dtype, chunk_bytes)))
        else:
            by_type.setdefault(share.matrix.dtype, []).append(share)
    for dtype, held in by_type.items():
        large = sum(share.nbytes for share in held) >= LARGE_BYTES
        with data_file(folder, number, dtype, chunk_bytes, large) as write:
            rows += [write(share) for share in held]
    return rows


@contextmanager
def data_file(
    folder: Path, number: int, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES, large: bool = True
) -> Iterator[Callable[[Share], Row]]:
    """One file of a member, which is whole and on the disk after the block.

    Inside it a function that writes a share of this type as the next batch; its row of the manifest. large: it is
    brought to the disk meanwhile. OSError as the system gives it.
    """
    name = f"{number:05d}.{name_of(dtype)}.arrow"
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with _flushed(file) if large else nullcontext():
            batches = _Batches(file, name, dtype, max(1, chunk_bytes // dtype.itemsize))
            yield batches.write
            batches.close()
        os.fsync(file)
    finally:
        os.close(file)


def cast_row(share: Share, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> Row:
    """The row of weights of type `dtype` of which nothing is stored. share: their masters."""
    digest = _digest(share, dtype, chunk_bytes) & _WORD
    return Row(share.tensor, WEIGHT, name_of(dtype), share.shape, share.extent, "", 0, digest)


class _Batches:
    """The batches of an open file, one after another. most: elements written and weighed at once."""

    def __init__(self, file: int, name: str, dtype: torch.dtype, most: int) -> None:
        from ds_dynatrain.checkpoint.arrow import Outline

        self.file, self.name, self.dtype, self.most = file, name, dtype, most
        self.outline = Outline(dtype)

    def write(self, share: Share) -> Row:
        """The next batch."""
        begin, total, numel = self.outline.batch(share.extent.numel, share.nbytes), 0, _numel(share)
        self._put_outline()
        for place, values in chunks(share.matrix, self.most):
            _put(self.file, begin + place.start * self.dtype.itemsize, values.view(torch.uint8).numpy().data)
            total += digest_of(share.extent, place, values, numel)
        return _row(share, self.name, begin, total)

    def close(self) -> None:
        """What stands behind the last batch."""
        self.outline.close()
        self._put_outline()

    def _put_outline(self) -> None:
        for at, data in self.outline.drain():
            _put(self.file, at, data)


@contextmanager
def _flushed(file: int) -> Iterator[None]:
    """Inside the block what is written is brought to the disk beside the writing, so that the end need not wait long.

    OSError, at the end, if the disk has failed meanwhile: the system says so once.
    """
    over, failed = threading.Event(), list[OSError]()

    def flush() -> None:
        while not failed and not over.wait(FLUSH_SECONDS):
            try:
                os.fdatasync(file)
            except OSError as error:
                failed.append(error)

    thread = threading.Thread(target=flush, name="dynatrain-flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors of one type and size are the same bytes; in words of 8, which is much faster."""
    mine, theirs = one.contiguous().view(torch.uint8).numpy(), other.contiguous().view(torch.uint8).numpy()
    end = len(mine) // 8 * 8
    words = np.array_equal(mine[:end].view(np.uint64), theirs[:end].view(np.uint64))
    return words and np.array_equal(mine[end:], theirs[end:])


def _put(file: int, at: int, data: bytearray | memoryview) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


def _digest(share: Share, dtype: torch.dtype, chunk_bytes: int) -> int:
    """Of the values in a type."""
    most, numel = max(1, chunk_bytes // share.matrix.element_size()), _numel(share)
    return sum(digest_of(share.extent, at, values.to(dtype), numel) for at, values in chunks(share.matrix, most))


def _numel(share: Share) -> int:
    numel = 1
    for dim in share.shape:
        numel *= dim
    return numel


def _row(share: Share, file: str, offset: int, digest: int) -> Row:
    dtype = name_of(share.matrix.dtype)
    return Row(share.tensor, share.kind, dtype, share.shape, share.extent, file, offset, digest & _WORD)
