"""Regions: the bytes of local buffers that moves read or write.

`MoveRegions` refer to buffers by name and are computed once, while training runs. `Regions` are the same bytes at the
addresses that the buffers have when the bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.space import BufferId, interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.transfer.series import Bytes, Matrix, rows_of

Buffers = Mapping[tuple[str, BufferId], torch.Tensor]
"""Local buffers, 1-D and contiguous, keyed by (state kind, buffer name)."""
Side = Literal["source", "target"]
Key = tuple[str, BufferId, int]
"""State kind, buffer, bytes per element."""


@dataclass(frozen=True, eq=False)
class MoveRegions:
    """The bytes that each move reads (side "source") or writes (side "target"), in buffers given by name.

    moves: the moves.
    side: "source" or "target".
    keys: the buffers that the moves use.
    reach: the smallest possible size of each buffer, in bytes.
    which, begin, length: for each move, the index of its buffer in `keys`, its first byte there, and its number of
        bytes.
    """

    moves: Moves
    side: Side
    keys: tuple[Key, ...]
    reach: Ints
    which: Ints
    begin: Ints
    length: Ints

    @staticmethod
    def of(moves: Moves, side: Side) -> MoveRegions:
        """Compute the regions that moves read (side "source") or write (side "target")."""
        if side == "source":
            kind, buffer, names = moves.source_kind, moves.source_buffer, moves.source_buffers
        else:
            kind, buffer, names = moves.kind, moves.target_buffer, moves.target_buffers
        itemsize = np.array([each.itemsize for each in moves.kinds], dtype=np.int64)[kind]
        begin = itemsize * (moves.source_offset if side == "source" else moves.target_offset)
        length = itemsize * (moves.stop - moves.start)
        codes, which = np.unique(kind * max(1, len(names)) + buffer, return_inverse=True)
        keys, reach = [], np.zeros(len(codes), dtype=np.int64)
        for number, place in zip(*divmod(codes, max(1, len(names))), strict=True):
            keys.append((moves.kinds[number].name, names[place], moves.kinds[number].itemsize))
        np.maximum.at(reach, which, begin + length)
        return MoveRegions(moves, side, tuple(keys), reach, which.reshape(-1), begin, length)

    def among(self, buffers: Buffers) -> Regions:
        """Return the same regions in the memory of the given buffers.

        Raises TransferError, naming kind and buffer, if a buffer is missing or too short, or has a wrong shape or
        element size.
        """
        data = []
        for number, (kind, name, itemsize) in enumerate(self.keys):
            where, tensor = f"{self.side} buffer {tuple(name)} of {kind}", buffers.get((kind, name))
            if tensor is None:
                raise TransferError(f"{where}: the plan needs it and it is not among the {len(buffers)} given")
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise TransferError(f"{where}: must be 1-D and contiguous, has shape {tuple(tensor.shape)}")
            if tensor.element_size() != itemsize:
                has = f"{tensor.dtype} has {tensor.element_size()} bytes"
                raise TransferError(f"{where}: {has}, the kind has {itemsize}")
            held = tensor.detach().view(torch.uint8)
            if self.reach[number] > held.numel():
                is_beyond = (self.which == number) & (self.begin + self.length > held.numel())
                moves, row = self.moves, int(np.flatnonzero(is_beyond)[0])
                raise TransferError(
                    f"{self.side} of {moves.kinds[int(moves.kind[row])].name} [{moves.start[row]}, {moves.stop[row]}): "
                    f"bytes {self.begin[row]} to {self.begin[row] + self.length[row]} leave a buffer of "
                    f"{held.numel()} bytes"
                )
            data.append(held)
        return Regions(tuple(data), self.which, self.begin, self.length)


@dataclass(frozen=True, eq=False)
class Regions:
    """The bytes that each move reads or writes, in memory.

    data: the buffers as bytes (uint8).
    which, begin, length: for each move, the index of its buffer in `data`, its first byte there, and its number of
        bytes.
    bases: the address of each buffer.
    sizes: the length of each buffer in bytes.
    is_on_host: whether all buffers are in host memory.
    """

    data: tuple[torch.Tensor, ...]
    which: Ints
    begin: Ints
    length: Ints
    bases: Ints = field(init=False)
    sizes: Ints = field(init=False)
    is_on_host: bool = field(init=False)
    _flat: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        bases, sizes, flat = list[int](), list[int](), list[Bytes]()
        for held in self.data:
            bases.append(held.data_ptr())
            sizes.append(held.numel())
            if held.device.type == "cpu":
                flat.append(held.numpy())
        object.__setattr__(self, "bases", np.array(bases, dtype=np.int64))
        object.__setattr__(self, "sizes", np.array(sizes, dtype=np.int64))
        object.__setattr__(self, "is_on_host", len(flat) == len(self.data))
        object.__setattr__(self, "_flat", flat)

    def pack(self, found: Sequence[Matrix], staged: torch.Tensor) -> None:
        """Copy matrices of bytes one after another into `staged`. On an accelerator the copies are only queued."""
        self.copy_to(_all_of(staged), _placed(found), is_queued=True)

    def unpack(self, found: Sequence[Matrix], staged: torch.Tensor) -> None:
        """Copy bytes that `pack` has packed from `staged` to matrices. On an accelerator the copies are only queued."""
        _all_of(staged).copy_to(self, ((place, matrix) for matrix, place in _placed(found)), is_queued=True)

    def wait(self) -> None:
        """Wait until the accelerators have completed all queued copies."""
        for device in {data.device for data in self.data if data.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

    def copy_to(self, other: Regions, both: Iterable[tuple[Matrix, Matrix]], is_queued: bool = False) -> None:
        """Copy matrices of bytes from these buffers into the buffers of `other`; the matrices must not overlap.

        both: pairs (matrix here, matrix in `other`).
        is_queued: whether to return before an accelerator has completed the copies.
        """
        for mine, theirs in both:
            if self.is_on_host and other.is_on_host:
                rows_of(other._flat[theirs.which], *theirs[1:])[:] = rows_of(self._flat[mine.which], *mine[1:])
            else:
                copy_matrix(self.data[mine.which], mine, other.data[theirs.which], theirs, is_queued)

    def view(self, matrix: Matrix) -> torch.Tensor:
        """Return the bytes of a matrix that has a single run, as a view of its buffer."""
        return self.data[matrix.which].narrow(0, matrix.begin, matrix.length)

    def rows(self, rows: Ints) -> Regions:
        """Return the regions of the moves with the given row numbers."""
        return Regions(self.data, self.which[rows], self.begin[rows], self.length[rows])

    def addresses(self) -> Ints:
        """Return the address of the first byte of each region."""
        return self.bases[self.which] + self.begin if len(self.data) else self.begin


def copy_matrix(
    origin: torch.Tensor, read: Matrix, into: torch.Tensor, written: Matrix, is_queued: bool = False
) -> None:
    """Copy a matrix of elements from one 1-D tensor to a matrix of equal shape in another, with a cast if types differ.

    The matrix is copied in one call, or run by run if its runs overlap or step backwards. Casts round as in torch (to
    nearest, ties to even).

    is_queued: as in `Regions.copy_to`.
    """
    number, length = read.number, read.length
    if number == 1 or min(read.step, written.step) >= length:  # torch has no negative strides
        out_of = origin.as_strided((number, length), (read.step, 1), origin.storage_offset() + read.begin)
        to = into.as_strided((number, length), (written.step, 1), into.storage_offset() + written.begin)
        to.copy_(out_of, non_blocking=is_queued)
        return
    for row in range(number):
        run = origin.narrow(0, read.begin + row * read.step, length)
        into.narrow(0, written.begin + row * written.step, length).copy_(run, non_blocking=is_queued)


def check_disjoint(read: list[Regions], written: list[Regions]) -> None:
    """Raise TransferError if `written` regions overlap `read` regions, so that unread bytes could be overwritten."""
    memory = []
    for parts in (read, written):
        base, size = interval.join([(part.bases, part.sizes) for part in parts])
        memory.append(interval.union(base, base + size))
    _, _, start, stop = interval.intersect(*memory[0], *memory[1])  # of buffers that are both read and written
    if not len(start):
        return
    needed = interval.union(*_touching(read, start, stop))
    _, _, low, high = interval.intersect(*_touching(written, start, stop), *needed)
    if len(low):
        raise TransferError(
            f"{int((high - low).sum())} bytes from address {int(low[0]):#x} on are needed and would be lost: source "
            "and target share memory at different offsets; give the target buffers memory of their own"
        )


def _touching(parts: list[Regions], start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return the begin and end addresses of all regions in buffers that overlap the given runs of addresses."""
    found = []
    for part in parts:
        touched, _, _, _ = interval.intersect(part.bases, part.bases + part.sizes, start, stop)
        inside = part.rows(np.flatnonzero(np.isin(part.which, touched)))
        found.append((inside.addresses(), inside.addresses() + inside.length))
    return interval.join(found)


def _all_of(staged: torch.Tensor) -> Regions:
    """Return regions whose only buffer is `staged`, so that matrices can be copied to or from it."""
    nothing = np.empty(0, dtype=np.int64)
    return Regions((staged,), nothing, nothing, nothing)


def _placed(found: Sequence[Matrix]) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield each matrix with its position in staged bytes, in which the matrices lie end to end."""
    at = 0
    for matrix in found:
        yield matrix, Matrix(0, at, matrix.length, matrix.number, matrix.length)
        at += matrix.nbytes
