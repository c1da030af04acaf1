"""Regions: the ranges of bytes in local buffers that the moves of a switch read or write.

`MoveRegions` refer to buffers by name and are computed once, while training runs. `Regions` are the same ranges at the
addresses that the buffers have when the bytes are moved.
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
    """The bytes that each move reads or writes, as rows at equal distances in buffers that are given by name.

    moves: the moves.
    side: "source" for the bytes that moves read, "target" for those that they write.
    keys: the buffers that the moves use.
    reach: the minimum size of each buffer in bytes.
    which: for each move, the index of its buffer in `keys`.
    begin: for each move, the offset of its first byte in the buffer.
    length: for each move, the number of bytes in a row.
    number: for each move, the number of rows. A move whose rows lie end to end in both buffers has a single row.
    step: for each move, the distance between the beginnings of two rows, in bytes.
    """

    moves: Moves
    side: Side
    keys: tuple[Key, ...]
    reach: Ints
    which: Ints
    begin: Ints
    length: Ints
    number: Ints
    step: Ints

    @staticmethod
    def of(moves: Moves, side: Side) -> MoveRegions:
        """Compute the regions that moves read (side "source") or write (side "target")."""
        if side == "source":
            kind, buffer, names = moves.source_kind, moves.source_buffer, moves.source_buffers
            offset, step = moves.source_offset, moves.source_step
        else:
            kind, buffer, names = moves.kind, moves.target_buffer, moves.target_buffers
            offset, step = moves.target_offset, moves.target_step
        itemsize = np.array([each.itemsize for each in moves.kinds], dtype=np.int64)[kind]
        is_dense = (moves.source_step == moves.length) & (moves.target_step == moves.length)
        number = np.where(is_dense, 1, moves.number)
        begin, length = itemsize * offset, itemsize * moves.length * (moves.number // number)
        step = np.where(is_dense, 0, itemsize * step)
        codes, which = np.unique(kind * max(1, len(names)) + buffer, return_inverse=True)
        keys, reach = [], np.zeros(len(codes), dtype=np.int64)
        for code, place in zip(*divmod(codes, max(1, len(names))), strict=True):
            keys.append((moves.kinds[code].name, names[place], moves.kinds[code].itemsize))
        np.maximum.at(reach, which, begin + (number - 1) * step + length)
        return MoveRegions(moves, side, tuple(keys), reach, which.reshape(-1), begin, length, number, step)

    @property
    def end(self) -> Ints:
        """The offset in bytes, for each move, of the end of its last row in the buffer."""
        return self.begin + (self.number - 1) * self.step + self.length

    def among(self, buffers: Buffers) -> Regions:
        """Find the regions in the given buffers, and return them with the memory of these buffers.

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
                moves, row = self.moves, int(np.flatnonzero((self.which == number) & (self.end > held.numel()))[0])
                raise TransferError(
                    f"{self.side} of {moves.kinds[int(moves.kind[row])].name} at coordinate {moves.start[row]}: bytes "
                    f"{self.begin[row]} to {self.end[row]} leave a buffer of {held.numel()} bytes"
                )
            data.append(held)
        return Regions(tuple(data), self.which, self.begin, self.length, self.number, self.step)


@dataclass(frozen=True, eq=False)
class Regions:
    """The bytes that each move reads or writes, in the memory of actual buffers.

    data: the buffers as bytes (uint8).
    which, begin, length, number, step: as in `MoveRegions`; `which` are indices into `data`.
    bases: the address of each buffer.
    sizes: the length of each buffer in bytes.
    is_on_host: whether all buffers are in host memory.
    """

    data: tuple[torch.Tensor, ...]
    which: Ints
    begin: Ints
    length: Ints
    number: Ints
    step: Ints
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
        """Copy matrices of bytes from these buffers into `staged`, end to end. On an accelerator the copies are only
        queued."""
        self.copy_to(regions_of(staged), _placed(found), is_queued=True)

    def unpack(self, found: Sequence[Matrix], staged: torch.Tensor) -> None:
        """Copy bytes from `staged` to matrices in these buffers, the reverse of `pack`. On an accelerator the copies
        are only queued."""
        regions_of(staged).copy_to(self, ((place, matrix) for matrix, place in _placed(found)), is_queued=True)

    def wait(self) -> None:
        """Wait until the accelerators have completed all queued copies."""
        for device in {data.device for data in self.data if data.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

    def copy_to(self, other: Regions, both: Iterable[tuple[Matrix, Matrix]], is_queued: bool = False) -> None:
        """Copy matrices of bytes from these buffers into the buffers of `other`; the matrices must not overlap.

        both: pairs of a matrix in these buffers and a matrix in the buffers of `other`.
        is_queued: whether to return before an accelerator has completed the copies.
        """
        for mine, theirs in both:
            if self.is_on_host and other.is_on_host:
                rows_of(other._flat[theirs.which], *theirs[1:])[:] = rows_of(self._flat[mine.which], *mine[1:])
            else:
                copy_matrix(self.data[mine.which], mine, other.data[theirs.which], theirs, is_queued)

    def view(self, matrix: Matrix) -> torch.Tensor:
        """Return the bytes of a matrix with a single row, as a view of its buffer."""
        return self.data[matrix.which].narrow(0, matrix.begin, matrix.length)

    def select(self, moves: Ints) -> Regions:
        """Return the regions of the moves with the given numbers."""
        columns = (self.which, self.begin, self.length, self.number, self.step)
        return Regions(self.data, *(column[moves] for column in columns))

    def addresses(self) -> Ints:
        """Return the address of the first byte of each region."""
        return self.bases[self.which] + self.begin if len(self.data) else self.begin

    def rows(self) -> tuple[Ints, Ints]:
        """Return the addresses at which each row of each region begins and ends."""
        move, nth = interval.expand(self.number)
        begin = self.addresses()[move] + nth * self.step[move]
        return begin, begin + self.length[move]


def pairs(read: MoveRegions, written: MoveRegions, moves: Ints | slice = slice(None)) -> list[tuple[Matrix, Matrix]]:
    """Return what moves read and write as pairs of matrices of bytes (read, written). Regions that are adjacent in both
    buffers are merged.

    moves: the indices of the moves, by default all.
    """
    number, sides = read.number[moves], (read, written)
    joined = (number[1:] == 1) & (number[:-1] == 1)
    for side in sides:
        which, begin, length = side.which[moves], side.begin[moves], side.length[moves]
        joined &= (np.diff(which) == 0) & (np.diff(begin) == length[:-1])
    first, last = interval.chains(joined, len(number))
    found = list[list[Matrix]]()
    for side in sides:
        begin, length = side.begin[moves], side.length[moves]
        merged = np.where(number[first] == 1, begin[last] + length[last] - begin[first], length[first])
        columns = side.which[moves][first], begin[first], side.step[moves][first], number[first], merged
        found.append(list(map(Matrix._make, np.stack(columns, axis=1).tolist())))
    return list(zip(*found, strict=True))


def copy_matrix(
    origin: torch.Tensor, read: Matrix, into: torch.Tensor, written: Matrix, is_queued: bool = False
) -> None:
    """Copy a matrix of elements from one 1-D tensor to a matrix of equal shape in another, with a cast if dtypes
    differ.

    The matrix is copied in one call, or row by row if its rows overlap or have a negative step. Casts round as in torch
    (to nearest, ties to even).

    origin: the tensor to read.
    into: the tensor to write.
    is_queued: whether to return before an accelerator has completed the copy.
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
    """Raise TransferError if regions to be written overlap regions to be read, because bytes could then be overwritten
    before they are read."""
    memory = []
    for parts in (read, written):
        base, size = interval.join([(part.bases, part.sizes) for part in parts])
        memory.append(interval.union(base, base + size))
    _, _, start, stop = interval.intersect(*memory[0], *memory[1])  # buffers that are read and written
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
    """Return the begin and end addresses of all rows in buffers that overlap given ranges of addresses.

    start, stop: the begin and end addresses of these ranges.
    """
    found = []
    for part in parts:
        touched, _, _, _ = interval.intersect(part.bases, part.bases + part.sizes, start, stop)
        found.append(part.select(np.flatnonzero(np.isin(part.which, touched))).rows())
    return interval.join(found)


def regions_of(staged: torch.Tensor) -> Regions:
    """Return regions whose only buffer is `staged`. They have no moves, and serve to copy matrices to or from the
    buffer."""
    return Regions((staged,), *(np.empty(0, np.int64),) * 5)


def _placed(found: Sequence[Matrix]) -> Iterator[tuple[Matrix, Matrix]]:
    """Yield each matrix together with its position in a staging buffer that holds all matrices end to end."""
    at = 0
    for matrix in found:
        yield matrix, Matrix(0, at, matrix.length, matrix.number, matrix.length)
        at += matrix.nbytes
