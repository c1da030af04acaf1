"""Reading of a checkpoint: a rank reads only the byte ranges of its own pieces, directly into its buffers.

The file and the position of each element follow from the manifest by arithmetic. Values that need a cast, small runs,
and values for buffers outside host memory are read through a staging chunk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ds_dynatrain.checkpoint.extents import WORD, Extent, digest_of, matrix_in, named, placed
from ds_dynatrain.checkpoint.files import open_regular
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.writing import Buffers
from ds_dynatrain.errors import CheckpointDamaged
from ds_dynatrain.space import (
    MASTER,
    WEIGHT,
    BufferId,
    Kind,
    Layout,
    LogicalTensor,
    Pieces,
    VirtualParameterSpace,
    ZeroRules,
    interval,
    of_kind,
    standard_kinds,
)
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.tensor import split_by_tensor
from ds_dynatrain.transfer import digest

STAGE_BYTES = 4 << 20
DIRECT_BYTES = 64 << 10
"""Minimum length in bytes of a run that is read by itself, directly into its buffer."""
GAP_BYTES = 4096
"""Largest gap in bytes between two short runs that are read together. The system reads whole pages anyway."""
CALL_BYTES = 1 << 30
MOST_OPEN = 128
"""Maximum number of files open at once. Checkpoints of other tools may have a file per tensor."""


_ALONE = Layout(data=1, zero_stage=0)
_BUFFER = BufferId("tensor", 0)


class ReadRequest(NamedTuple):
    """Runs of elements to read from files. All of them have the same element type in the files.

    columns: for each run, the index of its file, the position of its first byte in the file, its number of elements,
        the index of its target buffer, and its offset in the buffer.
    files: the names of the files.
    buffers: the names of the target buffers.
    dtype: the element type in the files.
    """

    columns: Ints
    files: tuple[str, ...]
    buffers: tuple[BufferId, ...]
    dtype: torch.dtype


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
            self._read(self._requests(vps, kind, vps.holding(layout, rank, kind))[0], of_kind(buffers, kind))
        if WEIGHT not in kinds:
            return
        wanted = vps.holding(layout, rank, WEIGHT)
        if kept is not None:
            wanted = wanted.subtract(*interval.union(kept.start, kept.stop))
        weights, masters = of_kind(buffers, WEIGHT), of_kind(buffers, MASTER)
        stored, cast = self._requests(vps, WEIGHT, wanted)
        self._read(stored, weights)
        held = vps.holding(layout, rank, MASTER) if masters else Pieces.empty()
        for _, _, (weight, master) in placed(vps.line, cast.intersect(held), (weights, masters)):
            if weight.data_ptr() != master.data_ptr():
                weight.copy_(master)
        missing = cast.subtract(*interval.union(held.start, held.stop))
        self._read(self._requests(vps, MASTER, missing)[0], weights)

    def _requests(self, vps: VirtualParameterSpace, kind: str, pieces: Pieces) -> tuple[list[ReadRequest], Pieces]:
        """Return (requests that read pieces of a state kind, pieces that must be cast from masters instead).

        Raises CheckpointDamaged if the checkpoint does not contain the state kind of one of the tensors.
        """
        numbers, parts = split_by_tensor(vps.bases, pieces)
        found: dict[torch.dtype, list[Ints]] = {}
        files: dict[str, int] = {}
        cast: list[tuple[Ints, Ints, Ints]] = []
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            tensor, base = vps.tensors[int(numbers[low])], int(vps.bases[numbers[low]])
            if (tensor.name, kind) not in self.manifest.rows:
                raise CheckpointDamaged(f"{kind} of {tensor.name!r} is not in it")
            runs = self.manifest.runs(tensor.name, kind)
            begin, end = parts.start[low:high] - base, parts.stop[low:high] - base
            row, run, first, last = interval.intersect(begin, end, runs.start, runs.stop)
            known = np.array([files.setdefault(name, len(files)) for name in runs.files] or [0], dtype=np.int64)
            offset = parts.offset[low:high][row] + first - begin[row]
            here = runs.file[run] >= 0
            cast.append((row[~here] + low, first[~here] + base, last[~here] + base))
            dtype = named(runs.dtype)
            position = runs.position[run] + (first - runs.start[run]) * dtype.itemsize
            columns = known[runs.file[run]], position, last - first, parts.buffer[low:high][row], offset
            found.setdefault(dtype, []).append(np.stack(columns)[:, here])
        requests = [
            ReadRequest(_joined(np.concatenate(each, axis=1), dtype.itemsize), tuple(files), parts.buffers, dtype)
            for dtype, each in found.items()
        ]
        if not cast:
            return requests, Pieces.empty(parts.buffers)
        return requests, parts.take(*(np.concatenate(column) for column in zip(*cast, strict=True)))

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def _read(self, requests: list[ReadRequest], buffers: Mapping[BufferId, torch.Tensor]) -> None:
        for request in requests:
            self._read_one(request, buffers)

    def _read_one(self, request: ReadRequest, buffers: Mapping[BufferId, torch.Tensor]) -> None:
        file, position, numel, buffer, offset = request.columns
        stage, length = self._stage, numel * request.dtype.itemsize
        end, short = position + length, length < DIRECT_BYTES
        joins = short[1:] & short[:-1] & (file[1:] == file[:-1]) & (position[1:] - end[:-1] <= GAP_BYTES)
        row, count = 0, len(length)

        def place(row: int) -> torch.Tensor:
            return buffers[request.buffers[buffer[row]]].detach().narrow(0, int(offset[row]), int(numel[row]))

        while row < count:
            stop = row + 1
            while stop < count and joins[stop - 1] and end[stop] - position[row] <= len(stage):
                stop += 1
            name, first = request.files[int(file[row])], int(position[row])
            if stop == row + 1:
                self._read_run(name, first, place(row), request.dtype, stage)
            else:
                read = stage[: int(end[stop - 1]) - first]
                self._pread(name, first, read)
                for each in range(row, stop):
                    begin = int(position[each]) - first
                    _copy(place(each), read[begin : begin + int(length[each])], request.dtype)
            row = stop

    def _read_run(self, name: str, at: int, place: torch.Tensor, dtype: torch.dtype, stage: torch.Tensor) -> None:
        if place.device.type == "cpu" and place.dtype == dtype:
            self._pread(name, at, place.view(torch.uint8))
            return
        most = max(1, len(stage) // dtype.itemsize)
        for begin in range(0, len(place), most):
            part = place[begin : begin + most]
            read = stage[: len(part) * dtype.itemsize]
            self._pread(name, at + begin * dtype.itemsize, read)
            _copy(part, read, dtype)

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
        stored, stage, total = named(row.dtype), self._stage, 0
        length = row.extent.length
        most = max(1, len(stage) // stored.itemsize)
        height = most // length
        begin = 0
        while begin < row.extent.numel:
            here = begin % length
            count = min(height, row.extent.count - begin // length) if height and not here else 1
            numel = count * length if count > 1 else min(most, length - here)
            values = stage[: numel * stored.itemsize]
            self._pread(row.file, row.offset + begin * stored.itemsize, values)
            at = Extent(begin, length if count > 1 else numel, length, count)
            total += digest_of(row.extent, at, values.view(stored).to(dtype or stored), row.numel)
            begin += numel
        return total & WORD


def _joined(columns: Ints, itemsize: int) -> Ints:
    """Sort the columns of a `ReadRequest` by file and position, and merge runs adjacent in both file and buffer."""
    columns = columns[:, np.lexsort((columns[1], columns[0]))]
    file, position, numel, buffer, offset = columns
    goes_on = (np.diff(file) == 0) & (np.diff(buffer) == 0) & (np.diff(offset) == numel[:-1])
    goes_on &= np.diff(position) == numel[:-1] * itemsize
    first = np.flatnonzero(np.append(True, ~goes_on)[: len(file)])
    found = columns[:, first]
    if len(first):
        found[2] = np.add.reduceat(numel, first)
    return found


def _copy(place: torch.Tensor, read: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy `read`, the bytes of elements of type `dtype`, into `place`, with a cast if types differ.

    The bytes need not be aligned to the element size.
    """
    aligned = read if read.data_ptr() % dtype.itemsize == 0 else read.clone()
    place.copy_(aligned.view(dtype))


# ---- whole tensors ---------------------------------------------------------------------------------------------------


def whole(reader: Reader, tensor: LogicalTensor, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of one state kind of a tensor, in the stored type or cast to `dtype`.

    A weight that is not stored is cast from its master. Raises CheckpointDamaged if any value is missing.
    """
    rows = reader.manifest.rows.get((tensor.name, kind), ())
    wanted = dtype or (named(rows[0].dtype) if rows else torch.float32)
    alone = LogicalTensor(tensor.name, tensor.shape, tensor.group)
    others = () if kind in (WEIGHT, MASTER) else (Kind(kind, wanted.itemsize),)
    kinds = standard_kinds(wanted.itemsize, moments=others)
    vps = VirtualParameterSpace.of([alone], ZeroRules(), kinds, _ALONE, (0,))
    values = torch.empty(tensor.numel, dtype=wanted)
    if tensor.numel:
        reader.fill(vps, _ALONE, 0, {(kind, _BUFFER): values})
    return values.view(tensor.shape)


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
        place = each.start, each.step, each.length, each.count
        matrix_in(found.view(-1), *place).copy_(matrix_in(masters.view(-1), *place))
    return found
