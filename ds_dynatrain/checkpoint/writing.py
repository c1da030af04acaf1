"""Writing of a rank's share of a checkpoint: one file per element type, with one record batch per extent.

The layout determines which rank writes an element. A partitioned state kind is written by the ranks that hold its
parts. A replicated kind is divided evenly among its holders. Weights that equal their masters cast to another type are
not stored; saving checks this value by value. Values are written directly from their memory. Values that are not
contiguous, or not in host memory, are copied first, extent by extent.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ds_dynatrain.checkpoint.extents import Extent, chunks, digest_of_part, name_of, placed
from ds_dynatrain.checkpoint.manifest import ManifestRow
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace, of_kind
from ds_dynatrain.transfer import allocate

CHUNK_BYTES = 1 << 20
"""Number of bytes that are compared at once; small enough to stay in the cache."""
LARGE_BYTES = 32 << 20
"""Minimum size in bytes of a file that is flushed to disk while it is being written."""
FLUSH_SECONDS = 0.02
ALIGN = 64
"""Alignment in bytes of the copies that a background save makes."""
Buffers = Mapping[tuple[str, BufferId], torch.Tensor]
"""The flat local tensors of a rank, keyed by (state kind, buffer)."""
Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """An extent of a tensor (see `extents`) that this member writes.

    tensor: the name of the tensor.
    kind: the state kind.
    shape: the shape of the whole tensor.
    extent: the position of the values in the tensor.
    matrix: the values, one row per run.
    master: for a weight, the values of its master, if this rank has them.
    """

    tensor: str
    kind: str
    shape: tuple[int, ...]
    extent: Extent
    matrix: torch.Tensor
    master: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.matrix.numel() * self.matrix.element_size()

    def is_cast(self) -> bool:
        """Return whether the values equal the master cast to their type, bit by bit, and so need not be stored."""
        weight, master = self.matrix, self.master
        if master is None or weight.data_ptr() == master.data_ptr():
            return master is not None
        most = CHUNK_BYTES // master.element_size()
        pairs = zip(chunks(weight, most), chunks(master, most), strict=True)
        return all(np.array_equal(_bytes(held), _bytes(of.to(held.dtype))) for (_, held), (_, of) in pairs)

    def row(self, dtype: torch.dtype, file: str = "", offset: int = 0) -> ManifestRow:
        """Return the manifest row for this extent, with the digest of its values in type `dtype`.

        file: "" for weights that are not stored.
        """
        digest = digest_of_part(self.matrix, self.extent, math.prod(self.shape), dtype)
        return ManifestRow(self.tensor, self.kind, name_of(dtype), self.shape, self.extent, file, offset, digest)


# ---- who writes what -------------------------------------------------------------------------------------------------


def shares_of(
    vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers, kinds: tuple[str, ...]
) -> Iterator[Share]:
    """Yield the shares (extents of tensors) of the given state kinds that a rank of the layout writes.

    A rank that writes masters also yields their weights, which are stored only if a cast does not reproduce them.
    """
    for kind in kinds:
        space = vps.with_groups(WEIGHT, (FROZEN,)) if kind == WEIGHT else vps
        yield from _shares(vps, kind, (space.owned(layout, rank, kind),), (of_kind(buffers, kind),))
        if kind == WEIGHT:
            both = vps.holding(layout, rank, WEIGHT).intersect(vps.owned(layout, rank, MASTER))
            yield from _shares(vps, kind, both, (of_kind(buffers, WEIGHT), of_kind(buffers, MASTER)))


def _shares(
    vps: VirtualParameterSpace,
    kind: str,
    sides: tuple[Pieces, ...],
    memory: tuple[dict[BufferId, torch.Tensor], ...],
) -> Iterator[Share]:
    """Yield the fewest shares that cover the pieces in `sides[0]`.

    sides: the pieces to write and, for weights, optionally the same pieces of their masters.
    memory: the buffers of each of the two sides.
    """
    for number, extent, matrices in placed(vps.line, sides, memory):
        yield Share(vps.tensors[number].name, kind, vps.tensors[number].shape, extent, *matrices)


class HostMemory:
    """Host memory for copies of shares. Each save reuses it, because touching new memory is slow."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copies(self, shares: Sequence[Share]) -> list[Share]:
        """Return copies of the shares. Their values stay unchanged until the next call."""
        both = (values for share in shares for values in (share.matrix, share.master) if values is not None)
        wanted = {_place(values): values for values in both}
        sizes = [-(-values.nbytes // ALIGN) * ALIGN for values in wanted.values()]
        if len(self._room) < sum(sizes):
            self._room = torch.empty(0, dtype=torch.uint8)  # free the old before allocating the new
            self._room = allocate(sum(sizes), torch.uint8)
        rooms, held = self._room[: sum(sizes)].split(sizes), dict[Place, torch.Tensor]()
        for room, (place, values) in zip(rooms, wanted.items(), strict=True):
            held[place] = room[: values.nbytes].view(values.dtype).view(values.shape).copy_(values.detach())
        return [
            replace(
                share,
                matrix=held[_place(share.matrix)],
                master=None if share.master is None else held[_place(share.master)],
            )
            for share in shares
        ]


def _place(values: torch.Tensor) -> Place:
    return values.data_ptr(), values.dtype, values.shape, values.stride()


# ---- files -----------------------------------------------------------------------------------------------------------


def write_shares(folder: Path, number: int, shares: Iterable[Share]) -> list[ManifestRow]:
    """Write the data files of member `number`, flush them to disk, and return the manifest rows of the shares.

    Raises OSError if the system cannot write, for example because the disk is full.
    """
    by_type: dict[torch.dtype, list[Share]] = {}
    rows: list[ManifestRow] = []
    for share in shares:
        if share.is_cast():
            rows.append(share.row(share.matrix.dtype))
        else:
            by_type.setdefault(share.matrix.dtype, []).append(share)
    for dtype, held in by_type.items():
        large = sum(share.nbytes for share in held) >= LARGE_BYTES
        with data_file(folder, number, dtype, large) as write:
            rows += [write(share) for share in held]
    return rows


@contextmanager
def data_file(
    folder: Path, number: int, dtype: torch.dtype, large: bool = True
) -> Iterator[Callable[[Share], ManifestRow]]:
    """Context manager that opens one data file of a member, and completes it and flushes it to disk at the end.

    Yields a function that writes a share of type `dtype` to the file and returns the share's manifest row.

    number: the member's number.
    large: whether to flush the file to disk during the context as well.

    Raises OSError if the system cannot write.
    """
    from ds_dynatrain.checkpoint.arrow import ArrowValues

    name = f"{number:05d}.{name_of(dtype)}.arrow"
    with (folder / name).open("xb") as file:
        column = ArrowValues(file, dtype)

        def write(share: Share) -> ManifestRow:
            values = share.matrix.detach().to("cpu").contiguous()
            return replace(share, matrix=values).row(dtype, name, column.write(values.view(-1)))

        with _flushed(file.fileno()) if large else nullcontext():
            yield write
            column.close()
            file.flush()
        os.fsync(file.fileno())


@contextmanager
def _flushed(file: int) -> Iterator[None]:
    """Context manager that flushes an open file to disk repeatedly in a thread, so that the final flush is short.

    Raises OSError at the end if a flush failed, because the system reports such a failure only once.
    """
    over = threading.Event()

    def flush() -> None:
        while not over.wait(FLUSH_SECONDS):
            os.fdatasync(file)

    with ThreadPoolExecutor(1, "dynatrain-flush") as beside:
        flushing = beside.submit(flush)
        try:
            yield
        finally:
            over.set()
    flushing.result()


def _bytes(flat: torch.Tensor) -> NDArray[np.uint8]:
    return flat.view(torch.uint8).numpy()
