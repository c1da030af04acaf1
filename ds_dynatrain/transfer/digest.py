"""A digest of elements and their logical positions that adds up over disjoint pieces, whatever the layout.

A logical tensor is read as its row-major bytes, padded with zeros to whole 32-bit words (little endian). Its digest
is

    sum over words of  word[j] * weight[j]   mod 2^64,      weight[j] = table[j mod T] * factor[j div T]

so a piece that starts or ends inside a word adds the bytes it has, and any split of a tensor adds up to the same
number. Every weight is odd and looks random (splitmix64), thus one changed word always changes the digest, and a
swap, a shift or a pair of sign flips does so with probability 1 - 2^-32 or better. Words have 32 bits because with
64-bit words the sign bit of every second float has weight 2^63, and two flips cancel.

Speed comes from two words at once: for v = low + 2^32 * high,  v * a + (v >> 32) * b  weighs `low` by a and `high` by
b + 2^32 * a; both are odd when a and b are. The tables (2 x 128 KiB) stay in the second-level cache. The sum itself is
computed in `weighing`. It protects against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import BufferId, Pieces, interval
from ds_dynatrain.transfer.device_digest import Runs as DeviceRuns
from ds_dynatrain.transfer.device_digest import by_arithmetic, has_kernel
from ds_dynatrain.transfer.device_digest import digests as device_digests
from ds_dynatrain.transfer.series import series
from ds_dynatrain.transfer.weighing import SPREAD_BYTES, UNIT_BYTES, Bytes, Runs, UInt64s, summer

Int64s = npt.NDArray[np.int64]

SPARSEST = 8
"""Runs are spread out if they are at least one part in so many of what they span."""

_MASK = (1 << 64) - 1


def digest(values: torch.Tensor, start: int = 0) -> int:
    """Digest, in [0, 2^64), of the elements start ... start + len(values) - 1 of one logical tensor.

    `values` is 1-D and contiguous, of any dtype. The number is the same on every device. Digests of disjoint parts of
    a tensor add up modulo 2^64 to the digest of the whole.
    """
    _check(values)
    if values.device.type != "cpu":
        return digest_on_device(values, start)
    data = _bytes(values)
    return summer().sum(data, Runs(0, 0, 1, len(data), start * values.element_size(), 0)) & _MASK


def digest_pieces(pieces: Pieces, buffers: Mapping[BufferId, torch.Tensor], bases: Int64s) -> UInt64s:
    """Digests of many tensors at once, of one state kind, from the runs that one rank holds: uint64, one per tensor.

    `buffers` has the 1-D buffers that the pieces name. Tensor i has the coordinates bases[i] to bases[i + 1]; `bases`
    is sorted and one longer than there are tensors. A run may span any number of tensors. What no run covers adds
    nothing, so the results of ranks that hold disjoint parts are summed (uint64 addition) to the digests of the whole
    tensors. TransferError if a run leaves its buffer or the line.
    """
    data = [_values_of(buffers, name) for name in pieces.buffers]
    _check_inside(pieces, data, bases)
    columns = _cut_at_tensors(pieces, bases)
    sums = np.zeros(len(bases) - 1, dtype=np.uint64)
    for device in {buffer.device for buffer in data}:
        there = np.array([buffer.device == device for buffer in data])
        mine = tuple(column[there[columns[3]]] for column in columns)
        sums += _on_host(mine, data, len(sums)) if device.type == "cpu" else _on_device(mine, data, len(sums), device)
    return sums


Columns = tuple[Int64s, ...]
"""Runs, each within a tensor: (tensor, flat index, length, buffer, offset), in elements."""


def _on_host(columns: Columns, data: list[torch.Tensor], tensors: int) -> UInt64s:
    sums, found = [0] * tensors, summer()
    for row, number in zip(*_series(columns), strict=True):
        index, begin, count, source, at = (int(column[row]) for column in columns)
        size = data[source].element_size()
        step = stride = 0
        if number > 1:
            step, stride = int(columns[1][row + 1]) - begin, int(columns[4][row + 1]) - at
        runs = Runs(at * size, stride * size, int(number), count * size, begin * size, step * size)
        sums[index] += found.sum(_bytes(data[source]), runs)
    return np.array([value & _MASK for value in sums], dtype=np.uint64)


def _on_device(columns: Columns, data: list[torch.Tensor], tensors: int, device: torch.device) -> UInt64s:
    tensor, begin, count, source, at = columns
    if not has_kernel(device):
        sums = [0] * tensors
        for index, first, number, buffer, offset in zip(*(column.tolist() for column in columns), strict=True):
            sums[index] += digest_on_device(data[buffer][offset : offset + number], first)
        return np.array([value & _MASK for value in sums], dtype=np.uint64)
    size = np.array([values.element_size() for values in data])[source]
    base = np.array([values.data_ptr() for values in data])[source]
    return device_digests(DeviceRuns(base + at * size, begin * size, count * size, tensor), tensors, device)


def digest_on_device(values: torch.Tensor, start: int = 0) -> int:
    """The number that `digest` gives, computed on the device of the values."""
    _check(values)
    if values.numel() == 0:
        return 0
    size, data = values.element_size(), values.detach().view(torch.uint8)
    if not has_kernel(values.device):
        return by_arithmetic(data, start * size)
    run = (data.data_ptr(), start * size, data.numel(), 0)
    return int(device_digests(DeviceRuns(*(np.array([value]) for value in run)), 1, values.device)[0])


def _check(values: torch.Tensor) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        shape, stride = tuple(values.shape), values.stride()
        raise TransferError(f"digests are of 1-D contiguous values, got shape {shape}, strides {stride}: flatten first")


def _bytes(values: torch.Tensor) -> Bytes:
    flat: Bytes = values.detach().view(torch.uint8).numpy()
    return flat


def _values_of(buffers: Mapping[BufferId, torch.Tensor], name: BufferId) -> torch.Tensor:
    if name not in buffers:
        raise TransferError(f"the pieces lie in buffer {tuple(name)}, which is not among the {len(buffers)} given")
    _check(buffers[name])
    return buffers[name]


def _check_inside(pieces: Pieces, data: list[torch.Tensor], bases: Int64s) -> None:
    if not len(pieces):
        return
    low, high = int(pieces.start.min()), int(pieces.stop.max())
    if low < bases[0] or high > bases[-1]:
        raise TransferError(f"pieces [{low}, {high}) leave the line [{int(bases[0])}, {int(bases[-1])})")
    room = np.array([buffer.numel() for buffer in data])[pieces.buffer]
    over = np.flatnonzero((pieces.offset < 0) | (pieces.offset + pieces.stop - pieces.start > room))
    if over.size:
        row = int(over[0])
        raise TransferError(
            f"piece [{pieces.start[row]}, {pieces.stop[row]}) at offset {pieces.offset[row]} leaves buffer "
            f"{tuple(pieces.buffers[pieces.buffer[row]])} of {room[row]} elements"
        )


def _cut_at_tensors(pieces: Pieces, bases: Int64s) -> Columns:
    """The pieces cut where a tensor ends: (tensor, flat index, length, buffer, offset) of each part."""
    filled = np.flatnonzero(np.diff(bases))
    row, nth, start, stop = interval.intersect(pieces.start, pieces.stop, bases[filled], bases[filled + 1])
    tensor, part = filled[nth], pieces.take(row, start, stop)
    return tensor, start - bases[tensor], stop - start, part.buffer, part.offset


def _series(columns: Columns) -> tuple[Int64s, Int64s]:
    """(first row, number of rows) of runs that can be weighed together, where spreading them out is no waste."""
    tensor, begin, count, source, at = columns
    longest = int(count.max(initial=0)) + 1
    same = (tensor * (int(source.max(initial=0)) + 1) + source) * longest + count
    gap = np.diff(begin, append=0)
    sparse = (gap <= 0) | (gap > SPARSEST * count) | (count * UNIT_BYTES > SPREAD_BYTES)
    same[sparse] = -1 - np.flatnonzero(sparse)
    return series(same, begin, at)
