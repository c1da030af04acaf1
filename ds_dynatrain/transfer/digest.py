"""A digest of elements and their logical positions that adds up over disjoint pieces, whatever the layout.

A logical tensor is read as its row-major bytes, padded with zeros to whole 32-bit words (little endian). Its digest
is

    sum over words of  word[j] * weight[j]   mod 2^64,      weight[j] = table[j mod T] * factor[j div T]

so a piece that starts or ends inside a word adds the bytes it has, and any split of a tensor adds up to the same
number. Every weight is odd and looks random (splitmix64), thus one changed word always changes the digest, and a
swap, a shift or a pair of sign flips does so with probability 1 - 2^-32 or better. Words have 32 bits because with
64-bit words the sign bit of every second float has weight 2^63, and two flips cancel.

Speed comes from two words at once: for v = low + 2^32 * high,  v * a + (v >> 32) * b  weighs `low` by a and `high` by
b + 2^32 * a; both are odd when a and b are. The tables (2 x 128 KiB) and one scratch row stay in the second-level
cache. It protects against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import BufferId, Pieces, interval
from ds_dynatrain.transfer.series import rows_of, series

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

UNIT_BYTES = 8
BLOCK_UNITS = 16384
"""Units of 8 bytes per block: 2 tables + scratch + data = 512 KiB, the fastest that still leaves half of a 1 MiB L2."""
BLOCK_BYTES = BLOCK_UNITS * UNIT_BYTES
SPREAD_BYTES = 8 * BLOCK_BYTES
"""Scratch for runs that are spread out as they lie in a tensor."""
SPARSEST = 8
"""Runs are spread out if they are at least one part in so many of what they span."""
DEVICE_BLOCKS = 256
"""Blocks weighed at once on an accelerator (32 MiB of values, about three times that in temporaries)."""

_MASK = (1 << 64) - 1
_HALF = np.uint64(32)
_LOW_SEED, _HIGH_SEED, _FACTOR_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0


def digest(values: torch.Tensor, start: int = 0) -> int:
    """Digest, in [0, 2^64), of the elements start ... start + len(values) - 1 of one logical tensor.

    `values` is 1-D and contiguous, of any dtype. The number is the same on every device. Digests of disjoint parts of
    a tensor add up modulo 2^64 to the digest of the whole.
    """
    _check(values)
    if values.device.type != "cpu":
        return digest_on_device(values, start)
    size = values.element_size()
    return _Summer().sum(_bytes(values), start * size, values.data_ptr()) & _MASK


def digest_pieces(pieces: Pieces, buffers: Mapping[BufferId, torch.Tensor], bases: Int64s) -> UInt64s:
    """Digests of many tensors at once, of one state kind, from the runs that one rank holds: uint64, one per tensor.

    `buffers` has the 1-D buffers that the pieces name. Tensor i has the coordinates bases[i] to bases[i + 1]; `bases`
    is sorted and one longer than there are tensors. A run may span any number of tensors. What no run covers adds
    nothing, so the results of ranks that hold disjoint parts are summed (uint64 addition) to the digests of the whole
    tensors. TransferError if a run leaves its buffer or the line.
    """
    data = [_values_of(buffers, name) for name in pieces.buffers]
    sizes, addresses = [buffer.element_size() for buffer in data], [buffer.data_ptr() for buffer in data]
    flat = [_bytes(buffer) if buffer.device.type == "cpu" else None for buffer in data]
    _check_inside(pieces, data, bases)
    sums, summer = [0] * (len(bases) - 1), _Summer()
    columns = _cut_at_tensors(pieces, bases)
    for row, number in zip(*_series(columns), strict=True):
        index, begin, count, source, at = (int(column[row]) for column in columns)
        values, size = flat[source], sizes[source]
        if values is None:
            for each in range(row, row + number):
                begin, at = int(columns[1][each]), int(columns[4][each])
                sums[index] += digest_on_device(data[source][at : at + count], begin)
        elif number == 1:
            part = values[at * size : (at + count) * size]
            sums[index] += summer.sum(part, begin * size, addresses[source] + at * size)
        else:
            step, stride = int(columns[1][row + 1]) - begin, int(columns[4][row + 1]) - at
            runs = rows_of(values, at * size, stride * size, int(number), count * size)
            sums[index] += summer.sum_series(runs, begin * size, step * size)
    return np.array([value & _MASK for value in sums], dtype=np.uint64)


def digest_on_device(values: torch.Tensor, start: int = 0) -> int:
    """The number that `digest` gives, from torch's int64 arithmetic on the device of the values (for accelerators)."""
    _check(values)
    if values.numel() == 0:
        return 0
    data = values.detach().view(torch.uint8)
    low, high = (torch.from_numpy(table.view(np.int64).copy()).to(data.device) for table in _tables())
    begin = start * values.element_size()
    end, total, step = begin + data.numel(), 0, DEVICE_BLOCKS * BLOCK_BYTES
    for span in range(begin // BLOCK_BYTES * BLOCK_BYTES, end, step):
        from_byte, to_byte = max(begin, span), min(end, span + step)
        blocks = (to_byte - span + BLOCK_BYTES - 1) // BLOCK_BYTES
        padded = torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        padded[from_byte - span : to_byte - span] = data[from_byte - begin : to_byte - begin]
        units = padded.view(torch.int64).view(blocks, BLOCK_UNITS)
        rows = (units * low).sum(1) + (((units >> 32) & 0xFFFFFFFF) * high).sum(1)
        factors = torch.from_numpy(_factors(span // BLOCK_BYTES, blocks).view(np.int64)).to(data.device)
        total += int((rows * factors).sum().item())
    return total & _MASK


class _Summer:
    """Weighs runs of bytes on the CPU in scratch rows of its own, so that no temporary grows with the data."""

    def __init__(self) -> None:
        self._low, self._high = _tables()
        self._scratch = np.empty(BLOCK_UNITS, dtype=np.uint64)
        self._padded = np.empty(BLOCK_UNITS, dtype=np.uint64)

    def sum(self, data: Bytes, begin: int, address: int) -> int:
        """Weighted sum of `data`, which lies at `address` and starts at byte `begin` of the logical tensor.

        The caller reduces the sum mod 2^64.
        """
        end = begin + data.size
        first = begin // BLOCK_BYTES
        if end <= (first + 1) * BLOCK_BYTES:
            return self._weigh(data, begin, (address - begin) % UNIT_BYTES == 0) * _factor(first) if end > begin else 0
        total, aligned = 0, (address - begin) % UNIT_BYTES == 0
        for block, factor in enumerate(_factors(first, (end - 1) // BLOCK_BYTES - first + 1).tolist(), start=first):
            from_byte, to_byte = max(begin, block * BLOCK_BYTES), min(end, (block + 1) * BLOCK_BYTES)
            total += self._weigh(data[from_byte - begin : to_byte - begin], from_byte, aligned) * factor
        return total

    def sum_series(self, runs: Bytes, begin: int, step: int) -> int:
        """The same of runs, the rows of a matrix, of which the first starts at byte `begin`, each other `step` later.

        They are spread out with zeros between them, as they lie in the tensor: zeros weigh nothing.
        """
        total, length = 0, runs.shape[1]
        height = max(1, SPREAD_BYTES // step)
        room = np.zeros(height * step + UNIT_BYTES, dtype=np.uint8)
        for row in range(0, len(runs), height):
            part, first = runs[row : row + height], begin + row * step
            lead = first % UNIT_BYTES
            room[:] = 0
            spread = room[lead : lead + len(part) * step]
            spread.reshape(len(part), step)[:, :length] = part
            last = (len(part) - 1) * step + length
            total += self.sum(spread[:last], first, room.ctypes.data + lead)
        return total

    def _weigh(self, part: Bytes, begin: int, aligned: bool) -> int:
        """Sum of `part`, which lies in one block and starts at byte `begin`, without the block's factor.

        `aligned`: whole units of the logical tensor lie at addresses that are multiples of a unit.
        """
        lead = begin % UNIT_BYTES
        if aligned and (lead | part.size) % UNIT_BYTES == 0:
            units = part.view(np.uint64)
        else:
            units = self._pad(part, lead)
        count, at = units.size, begin % BLOCK_BYTES // UNIT_BYTES
        work = self._scratch[:count]
        np.right_shift(units, _HALF, out=work)
        np.multiply(work, self._high[at : at + count], out=work)
        high = int(np.add.reduce(work))
        np.multiply(units, self._low[at : at + count], out=work)
        return high + int(np.add.reduce(work))

    def _pad(self, part: Bytes, lead: int) -> UInt64s:
        """`part` as whole aligned units: zeros stand for the `lead` bytes before it and for what is missing behind."""
        count = (lead + part.size + UNIT_BYTES - 1) // UNIT_BYTES
        units = self._padded[:count]
        units[0] = units[-1] = 0
        units.view(np.uint8)[lead : lead + part.size] = part
        return units


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


@cache
def _tables() -> tuple[UInt64s, UInt64s]:
    """The odd multipliers a (of whole units) and b (of their high words), BLOCK_UNITS each; read-only."""
    position = np.arange(BLOCK_UNITS, dtype=np.uint64)
    low, high = (_splitmix(position, seed) | np.uint64(1) for seed in (_LOW_SEED, _HIGH_SEED))
    low.flags.writeable = high.flags.writeable = False
    return low, high


def _factors(first: int, count: int) -> UInt64s:
    """Odd factors of the blocks first ... first + count - 1."""
    return _splitmix(np.arange(first, first + count, dtype=np.uint64), _FACTOR_SEED) | np.uint64(1)


@lru_cache(maxsize=4096)
def _factor(block: int) -> int:
    return int(_factors(block, 1)[0])


def _splitmix(values: UInt64s, seed: int) -> UInt64s:
    """splitmix64 (Steele, Lea, Flood 2014; Vigna's constants): the numbers seed + (value + 1) * gamma, mixed."""
    mixed: UInt64s = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
