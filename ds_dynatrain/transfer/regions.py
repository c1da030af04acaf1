"""Regions: the bytes of local buffers that moves read or write, found by numbers before any byte is touched.

`Places` refer to buffers by name: they are found once, while training runs. `Regions` are the same places in the memory
that the buffers have when the bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.space import BufferId, interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.transfer.series import Bytes, Matrix, matrices, rows_of

Buffers = Mapping[tuple[str, BufferId], torch.Tensor]
"""Every local 1-D contiguous buffer, by the name of its state kind and its id."""
Side = Literal["source", "target"]
Key = tuple[str, BufferId, int]
"""State kind, buffer, bytes of an element."""


@dataclass(frozen=True, eq=False)
class Places:
    """One region of bytes per move, on one side of a switch, in buffers given by name.

    keys: the buffers. which, begin, length: per move, the index into `keys`, the first byte and the number of bytes.
    """

    moves: Moves
    side: Side
    keys: tuple[Key, ...]
    which: Ints
    begin: Ints
    length: Ints

    @staticmethod
    def of(moves: Moves, side: Side) -> Places:
        """Find the places that moves read (side "source") or write (side "target")."""
        is_source = side == "source"
        kind = moves.source_kind if is_source else moves.kind
        buffer = moves.source_buffer if is_source else moves.target_buffer
        offset = moves.source_offset if is_source else moves.target_offset
        names = moves.source_buffers if is_source else moves.target_buffers
        codes, which = np.unique(kind * max(1, len(names)) + buffer, return_inverse=True)
        numbers = [divmod(code, len(names)) for code in codes.tolist()]
        keys = tuple((moves.kinds[one].name, names[other], moves.kinds[one].itemsize) for one, other in numbers)
        itemsize = np.array([size for _, _, size in keys], dtype=np.int64)[which] if keys else offset
        length = (moves.stop - moves.start) * itemsize
        return Places(moves, side, keys, which.reshape(-1), offset * itemsize, length)

    def matrices(self, rows: Sequence[int]) -> list[Matrix]:
        """Return the regions of `rows`, one after another, as matrices."""
        chosen = list(rows)
        return matrices(self.which[chosen], self.begin[chosen], self.length[chosen])

    def among(self, buffers: Buffers) -> Regions:
        """Return the regions in the memory of `buffers`.

        TransferError, naming kind and buffer, for one that is missing, has another item size or shape, or is too short.
        """
        data = tuple(_bytes_of(buffers, *key, self.side) for key in self.keys)
        room = np.array([held.numel() for held in data], dtype=np.int64)
        short = np.flatnonzero(self.reach > room)
        if len(short):
            moves, row = self.moves, int(np.flatnonzero(self.begin + self.length > room[self.which])[0])
            kind = moves.kinds[int(moves.kind[row])].name
            raise TransferError(
                f"{self.side} of {kind} [{moves.start[row]}, {moves.stop[row]}): bytes {self.begin[row]} to "
                f"{self.begin[row] + self.length[row]} leave a buffer of {room[self.which[row]]} bytes"
            )
        return Regions(data, self.which, self.begin, self.length)

    @cached_property
    def reach(self) -> Ints:
        """Bytes that each buffer must have."""
        reach = np.zeros(len(self.keys), dtype=np.int64)
        np.maximum.at(reach, self.which, self.begin + self.length)
        return reach


@dataclass(frozen=True, eq=False)
class Regions:
    """One region of bytes per move, on one side of a switch.

    data: the buffers as bytes (uint8). which, begin, length: per move, the index into `data`, the first byte and the
    number of bytes.
    """

    data: tuple[torch.Tensor, ...]
    which: Ints
    begin: Ints
    length: Ints

    def pack(self, found: Sequence[Matrix], staged: torch.Tensor) -> None:
        """Copy matrices of bytes, one after another, into `staged`; only queued on an accelerator."""
        self.copy_to(_all_of(staged), _placed(found), is_queued=True)

    def unpack(self, found: Sequence[Matrix], staged: torch.Tensor) -> None:
        """Copy `staged` into matrices of bytes, one after another; only queued on an accelerator."""
        _all_of(staged).copy_to(self, ((place, matrix) for matrix, place in _placed(found)), is_queued=True)

    def wait(self) -> None:
        """Wait until an accelerator has done its queued copies."""
        for device in {data.device for data in self.data if data.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

    def copy_to(self, other: Regions, both: Iterable[tuple[Matrix, Matrix]], is_queued: bool = False) -> None:
        """Copy matrices of bytes into those of `other`; they must not overlap.

        is_queued: whether the host may go on before an accelerator has done it.
        """
        if self.is_on_host and other.is_on_host:
            for mine, theirs in both:
                other._runs(theirs)[:] = self._runs(mine)
            return
        for mine, theirs in both:
            is_matrix = min(mine.step - mine.length, theirs.step - theirs.length) >= 0  # torch has no steps back
            parts = [(mine, theirs)] if is_matrix else zip(_one_by_one(mine), _one_by_one(theirs), strict=True)
            for one, another in parts:
                other.runs_of(another).copy_(self.runs_of(one), non_blocking=is_queued)

    def view(self, matrix: Matrix) -> torch.Tensor:
        """Return a matrix of one run as a view of its buffer."""
        return self.data[matrix.which].narrow(0, matrix.begin, matrix.length)

    def runs_of(self, matrix: Matrix) -> torch.Tensor:
        """Return a matrix as a tensor with a row per run; its runs must not step back."""
        data = self.data[matrix.which]
        return data.as_strided((matrix.number, matrix.length), (matrix.step, 1), data.storage_offset() + matrix.begin)

    def rows(self, rows: Ints) -> Regions:
        """Return the regions of some moves."""
        return Regions(self.data, self.which[rows], self.begin[rows], self.length[rows])

    def addresses(self) -> Ints:
        """Address of the first byte of each region."""
        return self.bases[self.which] + self.begin if len(self.data) else self.begin

    @cached_property
    def bases(self) -> Ints:
        """Address of each buffer."""
        return np.array([data.data_ptr() for data in self.data], dtype=np.int64)

    @cached_property
    def is_on_host(self) -> bool:
        """Whether all buffers are in host memory."""
        return all(data.device.type == "cpu" for data in self.data)

    @cached_property
    def _flat(self) -> list[Bytes]:
        return [data.numpy() for data in self.data]

    def _runs(self, matrix: Matrix) -> Bytes:
        return rows_of(self._flat[matrix.which], matrix.begin, matrix.step, matrix.number, matrix.length)


def check_disjoint(read: list[Regions], written: list[Regions]) -> None:
    """Raise TransferError if a byte that is still needed would be overwritten: a buffer that moves within its own
    storage.
    """
    start, stop = _shared(read, written)
    read, written = ([_within(part, start, stop) for part in parts] for parts in (read, written))
    start, stop = interval.union(*_all(read))
    _, _, low, high = interval.intersect(*_all(written), start, stop)
    if len(low):
        raise TransferError(
            f"{int((high - low).sum())} bytes from address {int(low[0]):#x} on are needed and would be lost: source "
            "and target share memory at different offsets; give the target buffers memory of their own"
        )


def _shared(read: list[Regions], written: list[Regions]) -> tuple[Ints, Ints]:
    """Return the memory of buffers that are both read and written, as sorted, disjoint runs of addresses."""
    sides = []
    for parts in (read, written):
        base = np.concatenate([part.bases for part in parts])
        size = np.array([data.numel() for part in parts for data in part.data], dtype=np.int64)
        sides.append(interval.union(base, base + size))
    _, _, start, stop = interval.intersect(*sides[0], *sides[1])
    return start, stop


def _within(part: Regions, start: Ints, stop: Ints) -> Regions:
    """Return the regions in buffers that touch sorted, disjoint runs of addresses."""
    size = np.array([data.numel() for data in part.data], dtype=np.int64)
    row, _, _, _ = interval.intersect(part.bases, part.bases + size, start, stop)
    return part.rows(np.flatnonzero(np.isin(part.which, row)))


def _all(parts: list[Regions]) -> tuple[Ints, Ints]:
    """Return first and last addresses of all regions."""
    start = np.concatenate([part.addresses() for part in parts])
    return start, start + np.concatenate([part.length for part in parts])


def _all_of(staged: torch.Tensor) -> Regions:
    """Treat staged bytes as a buffer that matrices are copied from or to."""
    nothing = np.empty(0, dtype=np.int64)
    return Regions((staged,), nothing, nothing, nothing)


def _placed(found: Sequence[Matrix]) -> Iterator[tuple[Matrix, Matrix]]:
    """Pair each matrix with its place in staged bytes, where they follow one another."""
    at = 0
    for matrix in found:
        yield matrix, Matrix(0, at, matrix.length, matrix.number, matrix.length)
        at += matrix.nbytes


def _one_by_one(matrix: Matrix) -> list[Matrix]:
    """Return each run of a matrix as a matrix of its own."""
    which, begin, step, number, length = matrix
    return [Matrix(which, begin + row * step, length, 1, length) for row in range(number)]


def _bytes_of(buffers: Buffers, kind: str, name: BufferId, itemsize: int, side: str) -> torch.Tensor:
    where = f"{side} buffer {tuple(name)} of {kind}"
    tensor = buffers.get((kind, name))
    if tensor is None:
        raise TransferError(f"{where}: the plan needs it and it is not among the {len(buffers)} given")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise TransferError(f"{where}: must be 1-D and contiguous, has shape {tuple(tensor.shape)}")
    if tensor.element_size() != itemsize:
        raise TransferError(f"{where}: {tensor.dtype} has {tensor.element_size()} bytes, the kind has {itemsize}")
    return tensor.detach().view(torch.uint8)
