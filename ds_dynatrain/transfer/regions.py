"""Regions: the bytes of local buffers that moves read or write, found by numbers before any byte is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.space import BufferId, interval
from ds_dynatrain.space.tensor import Ints
from ds_dynatrain.transfer.series import Bytes, rows_of, series

Buffers = Mapping[tuple[str, BufferId], torch.Tensor]
"""Every local 1-D contiguous buffer, by the name of its state kind and its id."""


@dataclass(frozen=True, eq=False)
class Regions:
    """One region of bytes per move, on one side of a switch.

    data: the buffers as bytes (uint8). which, begin, length: per move, the index into `data`, the first byte, the
    bytes.
    """

    data: tuple[torch.Tensor, ...]
    which: Ints
    begin: Ints
    length: Ints

    def part(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Bytes start to stop of the region of move `row`."""
        return self.data[int(self.which[row])].narrow(0, int(self.begin[row]) + start, stop - start)

    def whole(self, row: int) -> torch.Tensor:
        """The region of move `row`."""
        return self.part(row, 0, int(self.length[row]))

    def pack(self, rows: Sequence[int], staged: torch.Tensor) -> None:
        """Copy the regions of `rows`, one after another, into host memory."""
        if not self._on_host:
            for region, place in self._pairs(rows, staged):
                place.copy_(region)
            return
        for runs, room in self._matrices(rows, staged.numpy()):
            room[:] = runs

    def unpack(self, rows: Sequence[int], staged: torch.Tensor) -> None:
        """Copy host memory, one region after another, into the regions of `rows`."""
        if not self._on_host:
            for region, place in self._pairs(rows, staged):
                region.copy_(place)
            return
        for runs, room in self._matrices(rows, staged.numpy()):
            runs[:] = room

    def copy_to(self, other: Regions) -> None:
        """Copy each region into the region of the other at the same row; equal lengths, nothing overlaps."""
        if not (self._on_host and other._on_host):
            for row in range(len(self.begin)):
                other.whole(row).copy_(self.whole(row))
            return
        mine, theirs = ([data.numpy() for data in side.data] for side in (self, other))
        same = (self.which * max(1, len(other.data)) + other.which) * (
            int(self.length.max(initial=0)) + 1
        ) + self.length
        for row, count in zip(*series(same, self.begin, other.begin), strict=True):
            source, target = self._matrix(mine, row, count), other._matrix(theirs, row, count)
            target[:] = source

    @property
    def _on_host(self) -> bool:
        return all(data.device.type == "cpu" for data in self.data)

    def _matrix(self, flat: Sequence[Bytes], row: int, count: int) -> Bytes:
        """The series of `count` regions from `row` on."""
        begin, length = int(self.begin[row]), int(self.length[row])
        step = int(self.begin[row + 1]) - begin if count > 1 else 0
        return rows_of(flat[self.which[row]], begin, step, int(count), length)

    def _matrices(self, rows: Sequence[int], staged: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """(regions, their place in the staged bytes) of each series among `rows`."""
        chosen = Regions(self.data, *(column[list(rows)] for column in (self.which, self.begin, self.length)))
        flat = [data.numpy() for data in self.data]
        same = chosen.which * (int(chosen.length.max(initial=0)) + 1) + chosen.length
        at = 0
        for row, count in zip(*series(same, chosen.begin), strict=True):
            found = chosen._matrix(flat, row, count)
            yield found, staged[at : at + found.size].reshape(found.shape)
            at += found.size

    def _pairs(self, rows: Sequence[int], staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for row in rows:
            length = int(self.length[row])
            yield self.whole(row), staged[at : at + length]
            at += length

    def addresses(self) -> Ints:
        """Address of the first byte of each region."""
        bases = np.array([data.data_ptr() for data in self.data], dtype=np.int64)
        return bases[self.which] + self.begin if len(bases) else self.begin


def regions(moves: Moves, buffers: Buffers, side: Literal["source", "target"]) -> Regions:
    """What the moves read of `buffers` (side "source") or write to them ("target").

    TransferError names kind and buffer that is missing, has another item size or another shape, or is too short.
    """
    is_source = side == "source"
    kind = moves.source_kind if is_source else moves.kind
    buffer = moves.source_buffer if is_source else moves.target_buffer
    offset = moves.source_offset if is_source else moves.target_offset
    names = moves.source_buffers if is_source else moves.target_buffers
    codes, which = np.unique(kind * max(1, len(names)) + buffer, return_inverse=True)
    data, sizes = [], []
    for code in codes.tolist():
        kind_number, buffer_number = divmod(code, len(names))
        wanted, name = moves.kinds[kind_number], names[buffer_number]
        data.append(_bytes_of(buffers, wanted.name, name, wanted.itemsize, side))
        sizes.append(wanted.itemsize)
    itemsize = np.array(sizes, dtype=np.int64)[which] if sizes else offset
    found = Regions(tuple(data), which.reshape(-1), offset * itemsize, (moves.stop - moves.start) * itemsize)
    _check_room(found, moves, side)
    return found


def check_disjoint(read: list[Regions], written: list[Regions]) -> None:
    """TransferError if a byte that is still needed would be overwritten: a buffer that moves within its own storage."""
    start, stop = _runs(read)
    start, stop = interval.union(start, stop)
    into_start, into_stop = _runs(written)
    _, _, low, high = interval.intersect(into_start, into_stop, start, stop)
    if len(low):
        raise TransferError(
            f"{int((high - low).sum())} bytes from address {int(low[0]):#x} on are needed and would be lost: source "
            "and target share memory at different offsets; give the target buffers memory of their own"
        )


def _runs(parts: list[Regions]) -> tuple[Ints, Ints]:
    start = np.concatenate([part.addresses() for part in parts])
    return start, start + np.concatenate([part.length for part in parts])


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


def _check_room(found: Regions, moves: Moves, side: str) -> None:
    room = np.array([data.numel() for data in found.data], dtype=np.int64)
    over = np.flatnonzero(found.begin + found.length > room[found.which]) if len(room) else found.begin
    if len(over):
        move = next(iter(moves.select(over[:1])))
        row = int(over[0])
        raise TransferError(
            f"{side} of {move.kind} [{move.start}, {move.stop}): bytes {found.begin[row]} to "
            f"{found.begin[row] + found.length[row]} leave a buffer of {room[found.which[row]]} bytes"
        )
