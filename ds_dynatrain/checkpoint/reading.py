"""Reading of a checkpoint: a rank reads only the byte ranges of its own pieces, directly into its buffers.

The file and the position of each element follow from the manifest by arithmetic. A staging buffer is used only for
values that need a cast, that are not contiguous, or that belong to buffers outside host memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ds_dynatrain.checkpoint.extents import WORD, digest_of, matrix_in, named, placed, regular
from ds_dynatrain.checkpoint.files import open_regular
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.writing import Buffers
from ds_dynatrain.errors import CheckpointDamaged
from ds_dynatrain.space import (
    MASTER,
    WEIGHT,
    BufferId,
    Layout,
    LogicalTensor,
    Pieces,
    VirtualParameterSpace,
    interval,
    of_kind,
)
from ds_dynatrain.space.tensor import split_by_tensor
from ds_dynatrain.transfer import digest

STAGE_BYTES = 4 << 20
GAP_BYTES = 4096
"""Largest gap in bytes between two runs that are read together. The system reads whole pages anyway."""
CALL_BYTES = 1 << 30
MOST_OPEN = 128
"""Maximum number of files open at once. Checkpoints of other tools may have a file per tensor."""


@dataclass
class Reader:
    """A reader of an open checkpoint.

    folder: the folder of the checkpoint.
    manifest: the positions of all values.
    budget_bytes: memory for values that cannot be read in place.
    bytes_read: number of bytes read so far.
    links: whether files may be symbolic links, as in the caches of download tools. Our own checkpoints never contain
        links.
    """

    folder: Path
    manifest: Manifest
    budget_bytes: int = STAGE_BYTES
    bytes_read: int = 0
    links: bool = False
    _open: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    @cached_property
    def _stage(self) -> torch.Tensor:
        return torch.empty(max(1, min(STAGE_BYTES, self.budget_bytes)), dtype=torch.uint8)

    # ---- whole states ------------------------------------------------------------------------------------------------

    def fill(
        self, vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers, kept: Pieces | None = None
    ) -> None:
        """Fill a rank's buffers with all state kinds that are in the checkpoint. Other buffers are left unchanged.

        A weight that the checkpoint does not store is cast from its master.

        buffers: the rank's flat buffers, keyed by (state kind, buffer name).
        kept: weights to leave unchanged.
        """
        kinds = {kind for kind, _ in buffers}
        for kind in sorted(kinds & {kind for _, kind in self.manifest.rows} - {WEIGHT}):
            self._read(vps, kind, vps.holding(layout, rank, kind), of_kind(buffers, kind))
        if WEIGHT not in kinds:
            return
        wanted = vps.holding(layout, rank, WEIGHT)
        if kept is not None:
            wanted = wanted.subtract(*interval.union(kept.start, kept.stop))
        weights, masters = of_kind(buffers, WEIGHT), of_kind(buffers, MASTER)
        cast = self._read(vps, WEIGHT, wanted, weights)
        held = vps.holding(layout, rank, MASTER) if masters else Pieces.empty()
        for _, _, (weight, master) in placed(vps.line, cast.intersect(held), (weights, masters)):
            if weight.data_ptr() != master.data_ptr():
                weight.copy_(master)
        self._read(vps, MASTER, cast.subtract(*interval.union(held.start, held.stop)), weights)

    def _read(
        self, vps: VirtualParameterSpace, kind: str, pieces: Pieces, buffers: Mapping[BufferId, torch.Tensor]
    ) -> Pieces:
        """Read pieces of a state kind into their buffers. Return the pieces that must be cast from masters instead.

        Raises CheckpointDamaged if the checkpoint does not contain the state kind of one of the tensors.
        """
        numbers, parts = split_by_tensor(vps.bases, pieces)
        cast = [np.empty((3, 0), np.int64)]
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            tensor, base = vps.tensors[int(numbers[low])], int(vps.bases[numbers[low]])
            if (tensor.name, kind) not in self.manifest.rows:
                raise CheckpointDamaged(f"{kind} of {tensor.name!r} is not in it")
            runs = self.manifest.runs(tensor.name, kind)
            dtype, begin, end = named(runs.dtype), parts.start[low:high] - base, parts.stop[low:high] - base
            row, run, first, last = interval.intersect(begin, end, runs.start, runs.stop)
            position = runs.position[run] + (first - runs.start[run]) * dtype.itemsize
            offset = parts.offset[low:high][row] + first - begin[row]
            found = np.stack((runs.file[run], position, last - first, parts.buffer[low:high][row], offset))
            is_cast = found[0] < 0
            cast.append(np.stack((row + low, first + base, last + base))[:, is_cast])
            found = found[:, ~is_cast]
            file, position, numel, buffer, offset = found[:, np.lexsort((found[1], found[0]))]
            rows, counts = regular((file, buffer), numel, (offset,), position)
            for one, count in zip(rows.tolist(), counts.tolist(), strict=True):
                after, length = one + (count > 1), int(numel[one])
                flat, stride = buffers[parts.buffers[buffer[one]]].detach(), int(offset[after] - offset[one]) or length
                place, step = matrix_in(flat, int(offset[one]), stride, length, count), position[after] - position[one]
                self.copy_into(place, dtype, runs.files[file[one]], int(position[one]), int(step))
        return parts.take(*np.concatenate(cast, axis=1))

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def copy_into(self, place: torch.Tensor, dtype: torch.dtype, name: str, at: int, step: int = 0) -> None:
        """Fill the matrix `place` with elements from a file, one run of contiguous elements for each row.

        dtype: the type of the elements in the file.
        name: the name of the file.
        at: the position of the first run in the file, in bytes.
        step: the distance in bytes between the starts of two runs; 0 if they lie back to back.
        """
        (count, length), stage = place.shape, self._stage
        nbytes = length * dtype.itemsize
        step = step or nbytes
        if step == nbytes and place.is_contiguous():
            if place.device.type == "cpu" and place.dtype == dtype:
                self._pread(name, at, place.view(-1).view(torch.uint8))
                return
            place, nbytes = place.view(-1, 1), dtype.itemsize
            step = nbytes
        elif nbytes > len(stage) or step - nbytes > GAP_BYTES:
            for row in range(count):
                self.copy_into(place[row : row + 1], dtype, name, at + row * step)
            return
        height = max(1, len(stage) // step)
        for row in range(0, len(place), height):
            part = place[row : row + height]
            read = stage[: (len(part) - 1) * step + nbytes]
            self._pread(name, at + row * step, read)
            part.copy_(read.as_strided((len(part), nbytes), (step, 1)).contiguous().view(dtype))

    def _pread(self, name: str, at: int, place: torch.Tensor) -> None:
        """Fill `place` with bytes of a file, starting at byte `at`.

        Raises CheckpointDamaged if the file is too short.
        """
        if name not in self._open:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = open_regular(self.folder / name, self.links)
        view = place.numpy().data
        while view:
            done = os.preadv(self._open[name], [view[:CALL_BYTES]], at)
            if not done:
                raise CheckpointDamaged(f"{name} ends at byte {at}, and {len(view)} more are expected: it is cut off")
            self.bytes_read += done
            view, at = view[done:], at + done

    # ---- checks ------------------------------------------------------------------------------------------------------

    def values(self, row: ManifestRow) -> torch.Tensor:
        """Return the values of a stored extent as a new flat tensor."""
        found = torch.empty(row.nbytes, dtype=torch.uint8)
        self._pread(row.file, row.offset, found)
        return found.view(named(row.dtype)) if row.nbytes else torch.empty(0, dtype=named(row.dtype))

    def is_sound(self, row: ManifestRow) -> bool:
        """Read a stored extent, and return whether its digest equals the one that was recorded when it was written."""
        return self.digest(row) == row.digest

    def digest(self, row: ManifestRow, dtype: torch.dtype | None = None) -> int:
        """Return the digest of a stored extent, or of its values cast to `dtype`. The extent is read in chunks."""
        stored, total = named(row.dtype), 0
        for at in row.extent.parts(max(1, len(self._stage) // stored.itemsize)):
            values = self._stage[: at.numel * stored.itemsize]
            self._pread(row.file, row.offset + at.start * stored.itemsize, values)
            total += digest_of(row.extent, at, values.view(stored).to(dtype or stored), row.numel)
        return total & WORD


# ---- whole tensors ---------------------------------------------------------------------------------------------------


def whole(reader: Reader, tensor: LogicalTensor, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of one state kind of a tensor, in the stored type or cast to `dtype`.

    A weight that is not stored is cast from its master. Raises CheckpointDamaged if any value is missing.
    """
    held = reader.manifest.rows
    rows = held.get((tensor.name, kind), ())
    wanted = dtype or reader.manifest.dtype(tensor.name, kind) or torch.float32
    values = torch.empty(tensor.shape, dtype=wanted)
    is_cast = any(not row.file for row in rows)
    for each in ((MASTER, kind) if is_cast else (kind,)) if tensor.numel else ():
        if (tensor.name, each) not in held:
            raise CheckpointDamaged(f"{each} of {tensor.name!r} is not in it")
        reader.manifest.runs(tensor.name, each)  # raises unless each element is there once
        for row in held[tensor.name, each]:
            if row.file:
                reader.copy_into(row.extent.matrix_of(values.view(-1)), named(row.dtype), row.file, row.offset)
    return values


def proven(reader: Reader, tensor: LogicalTensor, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of one state kind of a tensor of our own checkpoint, like `whole`, after checking the digest.

    Digests belong to the values in the saved type, so the values are read and checked in that type. A weight that is
    not stored is checked as the cast of its master. If `dtype` is another type, such a weight is cast from the checked
    values of the master. Raises CheckpointDamaged, naming tensor and kind, if the values are not what was saved.
    """
    rows = reader.manifest.rows.get((tensor.name, kind), ())
    cast = [row.extent for row in rows if not row.file]
    values = whole(reader, tensor, kind)
    if rows and digest(values.view(-1)) != reader.manifest.digest(tensor.name, kind):
        read = f"{kind} of {tensor.name!r}" + (f", cast from {MASTER}," if cast else "")
        raise CheckpointDamaged(
            f"{reader.folder}: {read} is not what was saved; `ds-dynatrain checkpoint verify {reader.folder}` says "
            "where"
        )
    if dtype is None or dtype == values.dtype:
        return values
    found = values.to(dtype)
    masters = proven(reader, tensor, MASTER) if cast else values
    for each in cast:
        each.matrix_of(found.view(-1)).copy_(each.matrix_of(masters.view(-1)))
    return found
