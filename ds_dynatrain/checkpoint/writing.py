"""One member's files: its stretches, each a record batch of a file for its element type.

Values are written from where they lie in memory; what is not in one piece there, or not in host memory, goes through a
small chunk. The digest of each is taken on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_dynatrain.checkpoint.arrow import Block, batch_header, closing, opening, padded
from ds_dynatrain.checkpoint.elements import name_of, values_column
from ds_dynatrain.checkpoint.manifest import Row
from ds_dynatrain.checkpoint.stretches import Stretch, chunks, digest_of

CHUNK_BYTES = 1 << 20
"""Written and weighed at once, while it is in the cache."""


@dataclass(frozen=True)
class Share:
    """A stretch that this member writes. matrix: its values, a run a row. is_cast: nothing of it is stored."""

    tensor: str
    kind: str
    shape: tuple[int, ...]
    stretch: Stretch
    matrix: torch.Tensor
    is_cast: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return 0 if self.is_cast else self.matrix.numel() * self.matrix.element_size()


def write_shares(folder: Path, number: int, shares: Iterable[Share], chunk_bytes: int = CHUNK_BYTES) -> list[Row]:
    """Write the files of member `number` of the world, down to the disk; the rows of the manifest about them.

    OSError as the system gives it, such as for a disk that is full.
    """
    by_type: dict[torch.dtype, list[Share]] = {}
    rows: list[Row] = []
    for share in shares:
        if share.is_cast:
            rows.append(_row(share, "", 0, _digest(share, chunk_bytes)))
        else:
            by_type.setdefault(share.matrix.dtype, []).append(share)
    for dtype, held in by_type.items():
        rows += _write_file(folder, f"{number:05d}.{name_of(dtype)}.arrow", dtype, held, chunk_bytes)
    return rows


def _write_file(folder: Path, name: str, dtype: torch.dtype, shares: Sequence[Share], chunk_bytes: int) -> list[Row]:
    schema, blocks, rows = (values_column(dtype),), list[Block](), list[Row]()
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at = _put(file, 0, opening(schema))
        for share in shares:
            header = batch_header(schema, share.stretch.numel, [0, share.nbytes])
            block = Block(at, len(header), padded(share.nbytes))
            begin = _put(file, at, header)
            total = 0
            for place, values in chunks(share.matrix, max(1, chunk_bytes // dtype.itemsize)):
                _put(file, begin + place.start * dtype.itemsize, values.view(torch.uint8).numpy().data)
                total += digest_of(share.stretch, place, values, _numel(share))
            at = begin + block.body
            if block.body > share.nbytes:
                _put(file, begin + share.nbytes, bytes(block.body - share.nbytes))
            blocks.append(block)
            rows.append(_row(share, name, begin, total))
        _put(file, at, closing(schema, blocks))
        os.fsync(file)
    finally:
        os.close(file)
    return rows


def _put(file: int, at: int, data: bytes | memoryview) -> int:
    """Write all of it; where it ends."""
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
    return at


def _digest(share: Share, chunk_bytes: int) -> int:
    most = max(1, chunk_bytes // share.matrix.element_size())
    return sum(digest_of(share.stretch, at, values, _numel(share)) for at, values in chunks(share.matrix, most))


def _numel(share: Share) -> int:
    numel = 1
    for dim in share.shape:
        numel *= dim
    return numel


def _row(share: Share, file: str, offset: int, digest: int) -> Row:
    dtype = name_of(share.matrix.dtype)
    return Row(share.tensor, share.kind, dtype, share.shape, share.stretch, file, offset, digest & ((1 << 64) - 1))
