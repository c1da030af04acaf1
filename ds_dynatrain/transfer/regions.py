"""Regions: the bytes of local buffers that moves read or write, found by numbers before any byte is touched.

`MoveRegions` refer to buffers by name: they are found once, while training runs. `Regions` are the same places in
the memory that the buffers have when the bytes move.
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
"""Every local 1-D contiguous buffer, by the name of its state kind and its id."""
Side = Literal["source", "target"]
Key = tuple[str, BufferId, int]
"""State kind, buffer, bytes of an element."""


@dataclass(frozen=True, eq=False)
class MoveRegions:
    """One region of bytes per move, on one side of a switch, in buffers given by name.

    keys: the buffers. reach: the bytes that each of them must have. which, begin, length: per move, the index into
    `keys`, the first byte and the number of bytes.
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
        """Find the places that moves read (side "source") or write (side "target")."""
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
        """Return the regions in the memory of `buffers`.

        TransferError, naming kind and buffer, for one that is missing, has another item size or shape, or is too short.
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
    """One region of bytes per move, on one side of a switch.

    data: the buffers as bytes (uint8). which, begin, length: per move, the index into `data`, the first byte and the
    number of bytes. bases, sizes: the address of each buffer and its length. is_on_host: whether all are in host
    memory.
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
        for mine, theirs in both:
            if self.is_on_host and other.is_on_host:
                rows_of(other._flat[theirs.which], *theirs[1:])[:] = rows_of(self._flat[mine.which], *mine[1:])
            else:
                copy_matrix(self.data[mine.which], mine, other.data[theirs.which], theirs, is_queued)

    def view(self, matrix: Matrix) -> torch.Tensor:
        """Return a matrix of one run as a view of its buffer."""
        return self.data[matrix.which].narrow(0, matrix.begin, matrix.length)

    def rows(self, rows: Ints) -> Regions:
        """Return the regions of some moves."""
        return Regions(self.data, self.which[rows], self.begin[rows], self.length[rows])

    def addresses(self) -> Ints:
        """Address of the first byte of each region."""
        return self.bases[self.which] + self.begin if len(self.data) else self.begin


def copy_matrix(
    origin: torch.Tensor, read: Matrix, into: torch.Tensor, written: Matrix, is_queued: bool = False
) -> None:
    """Copy runs of elements of one 1-D tensor into another, at once, or one by one if they step back.

    A cast rounds as torch does (to nearest, ties to even). is_queued: as in `Regions.copy_to`.
    """
    number, length = read.number, read.length
    if number == 1 or min(read.step, written.step) >= length:  # torch has no steps back
        out_of = origin.as_strided((number, length), (read.step, 1), origin.storage_offset() + read.begin)
        to = into.as_strided((number, length), (written.step, 1), into.storage_offset() + written.begin)
        to.copy_(out_of, non_blocking=is_queued)
        return
    for row in range(number):
        run = origin.narrow(0, read.begin + row * read.step, length)
        into.narrow(0, written.begin + row * written.step, length).copy_(run, non_blocking=is_queued)


def check_disjoint(read: list[Regions], written: list[Regions]) -> None:
    """Raise TransferError if a byte that is still needed would be overwritten: a buffer that moves within its own
    storage.
    """
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
    """Return first and last addresses of the regions in buffers that touch sorted, disjoint runs of addresses."""
    found = []
    for part in parts:
        touched, _, _, _ = interval.intersect(part.bases, part.bases + part.sizes, start, stop)
        inside = part.rows(np.flatnonzero(np.isin(part.which, touched)))
        found.append((inside.addresses(), inside.addresses() + inside.length))
    return interval.join(found)


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
