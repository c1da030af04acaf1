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
from ds_dynatrain.transfer.series import series
from ds_dynatrain.transfer.weighing import (
    BLOCK_BYTES,
    BLOCK_UNITS,
    SPREAD_BYTES,
    UNIT_BYTES,
    Bytes,
    Runs,
    UInt64s,
    factors,
    summer,
    tables,
)

Int64s = npt.NDArray[np.int64]

SPARSEST = 8
"""Runs are spread out if they are at least one part in so many of what they span."""
DEVICE_BLOCKS = 256
"""Blocks weighed at once on an accelerator (32 MiB of values, about three times that in temporaries)."""

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
    sizes = [buffer.element_size() for buffer in data]
    flat = [_bytes(buffer) if buffer.device.type == "cpu" else None for buffer in data]
    _check_inside(pieces, data, bases)
    sums, found = [0] * (len(bases) - 1), summer()
    columns = _cut_at_tensors(pieces, bases)
    for row, number in zip(*_series(columns), strict=True):
        index, begin, count, source, at = (int(column[row]) for column in columns)
        values, size = flat[source], sizes[source]
        if values is None:
            for each in range(row, row + number):
                begin, at = int(columns[1][each]), int(columns[4][each])
                sums[index] += digest_on_device(data[source][at : at + count], begin)
            continue
        step = stride = 0
        if number > 1:
            step, stride = int(columns[1][row + 1]) - begin, int(columns[4][row + 1]) - at
        runs = Runs(at * size, stride * size, int(number), count * size, begin * size, step * size)
        sums[index] += found.sum(values, runs)
    return np.array([value & _MASK for value in sums], dtype=np.uint64)


def digest_on_device(values: torch.Tensor, start: int = 0) -> int:
    """The number that `digest` gives, from torch's int64 arithmetic on the device of the values (for accelerators)."""
    _check(values)
    if values.numel() == 0:
        return 0
    data = values.detach().view(torch.uint8)
    low, high = (torch.from_numpy(table.view(np.int64).copy()).to(data.device) for table in tables())
    begin = start * values.element_size()
    end, total, step = begin + data.numel(), 0, DEVICE_BLOCKS * BLOCK_BYTES
    for span in range(begin // BLOCK_BYTES * BLOCK_BYTES, end, step):
        from_byte, to_byte = max(begin, span), min(end, span + step)
        blocks = (to_byte - span + BLOCK_BYTES - 1) // BLOCK_BYTES
        padded = torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        padded[from_byte - span : to_byte - span] = data[from_byte - begin : to_byte - begin]
        units = padded.view(torch.int64).view(blocks, BLOCK_UNITS)
        rows = (units * low).sum(1) + (((units >> 32) & 0xFFFFFFFF) * high).sum(1)
        factor = torch.from_numpy(factors(span // BLOCK_BYTES, blocks).view(np.int64)).to(data.device)
        total += int((rows * factor).sum().item())
    return total & _MASK


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


def _cut_at_tensors(pieces: Pieces, bases: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
    """The pieces cut where a tensor ends: (tensor, flat index, length, buffer, offset) of each part."""
    filled = np.flatnonzero(np.diff(bases))
    row, nth, start, stop = interval.intersect(pieces.start, pieces.stop, bases[filled], bases[filled + 1])
    tensor, part = filled[nth], pieces.take(row, start, stop)
    return tensor, start - bases[tensor], stop - start, part.buffer, part.offset


def _series(columns: tuple[Int64s, Int64s, Int64s, Int64s, Int64s]) -> tuple[Int64s, Int64s]:
    """(first row, number of rows) of runs that can be weighed together, where spreading them out is no waste."""
    tensor, begin, count, source, at = columns
    longest = int(count.max(initial=0)) + 1
    same = (tensor * (int(source.max(initial=0)) + 1) + source) * longest + count
    gap = np.diff(begin, append=0)
    sparse = (gap <= 0) | (gap > SPARSEST * count) | (count * UNIT_BYTES > SPREAD_BYTES)
    same[sparse] = -1 - np.flatnonzero(sparse)
    return series(same, begin, at)
