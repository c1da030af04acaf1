"""The weights of a digest, and the weighted sum over ranges of bytes on the CPU.

The sum is computed by compiled code (`weigh.c`) if it was built, and by numpy otherwise. Both give the same number;
compiled code is two to five times as fast (`tools/bench_digest.py`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynatrain.transfer.series import rows_of

try:
    import ds_dynatrain.transfer.weigh as weigh
except ImportError:  # installed without a C compiler
    weigh = None  # type: ignore[assignment]

UInt64s = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

UNIT_BYTES = 8
BLOCK_UNITS = 16384
"""Units of 8 bytes per block. Two tables, scratch memory and data take 512 KiB in all: the fastest size that leaves
half of a 1 MiB L2 cache free."""
BLOCK_BYTES = BLOCK_UNITS * UNIT_BYTES
WORD_BYTES, SLICES = 4, 16
"""Number of bytes per read on accelerators (half a unit), and number of slices of a block. A kernel program reads one
slice."""
SPREAD_BYTES = 8 * BLOCK_BYTES
"""Size in bytes of the scratch memory in which numpy places runs at their distances in the tensor."""

LOW_SEED, HIGH_SEED, FACTOR_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0
_HALF = np.uint64(32)


class HostRuns(NamedTuple):
    """A series of `number` byte ranges (runs) of `length` bytes each.

    Run i begins at byte first + i * stride of a buffer, and at byte begin + i * step of the logical tensor.
    """

    first: int
    stride: int
    number: int
    length: int
    begin: int
    step: int


def is_compiled() -> bool:
    """Return whether the compiled implementation of the sum was built."""
    return weigh is not None


def summer() -> Compiled | InNumpy:
    """Return the fastest implementation of the sum that is available."""
    return InNumpy() if weigh is None else Compiled()


class Compiled:
    """The compiled implementation of a digest's weighted sum."""

    def sum(self, data: Bytes, runs: HostRuns) -> int:
        """Return the weighted sum of a series of runs, not yet reduced mod 2^64. Raises IndexError if a run leaves
        `data`."""
        return weigh.runs(data, *runs, *tables(), FACTOR_SEED)


class InNumpy:
    """The numpy implementation of a digest's weighted sum. Work buffers are reused, so the memory needed does not grow
    with the data."""

    def __init__(self) -> None:
        self._low, self._high = tables()
        self._scratch = np.empty(BLOCK_UNITS, dtype=np.uint64)
        self._padded = np.empty(BLOCK_UNITS, dtype=np.uint64)

    def sum(self, data: Bytes, runs: HostRuns) -> int:
        """Return the weighted sum of a series of runs, not yet reduced mod 2^64.

        Several runs are copied into one array at the distances that they have in the tensor. The zeros between them add
        nothing to the sum.
        """
        first, stride, count, length, begin, step = runs
        if not count * length:
            return 0
        rows = rows_of(data, first, stride, count, length)
        if count == 1:
            return self._run(rows[0], begin)
        total, height = 0, max(1, SPREAD_BYTES // step)
        room = np.zeros(height * step + UNIT_BYTES, dtype=np.uint8)
        for row in range(0, count, height):
            part, at = rows[row : row + height], begin + row * step
            lead = at % UNIT_BYTES
            room[:] = 0
            spread = room[lead : lead + len(part) * step]
            spread.reshape(len(part), step)[:, :length] = part
            last = (len(part) - 1) * step + length
            total += self._run(spread[:last], at)
        return total

    def _run(self, data: Bytes, begin: int) -> int:
        """Return the weighted sum of consecutive bytes that start at byte `begin` of the logical tensor."""
        end, aligned = begin + data.size, (data.ctypes.data - begin) % UNIT_BYTES == 0
        total = 0
        for block in range(begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
            from_byte, to_byte = max(begin, block * BLOCK_BYTES), min(end, (block + 1) * BLOCK_BYTES)
            total += self._weigh(data[from_byte - begin : to_byte - begin], from_byte, aligned) * _factor(block)
        return total

    def _weigh(self, part: Bytes, begin: int, aligned: bool) -> int:
        """Return the weighted sum of bytes within one block, without the block's factor.

        begin: the offset of the first byte in the logical tensor.
        aligned: whether whole units (8 bytes) of the tensor lie at addresses that are multiples of a unit.
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
        """Return bytes as whole aligned units of 8 bytes, padded with `lead` zero bytes before them and with zeros at
        the end."""
        count = (lead + part.size + UNIT_BYTES - 1) // UNIT_BYTES
        units = self._padded[:count]
        units[0] = units[-1] = 0
        units.view(np.uint8)[lead : lead + part.size] = part
        return units


@cache
def tables() -> tuple[UInt64s, UInt64s]:
    """Return the weights of the units of a block, as two read-only arrays of odd numbers: a for whole units, and b for
    their upper halves."""
    position = np.arange(BLOCK_UNITS, dtype=np.uint64)
    low, high = mixed_odd(position, LOW_SEED), mixed_odd(position, HIGH_SEED)
    low.flags.writeable = high.flags.writeable = False
    return low, high


def factors(first: int, count: int) -> UInt64s:
    """Return the factors of `count` consecutive blocks, which are odd numbers.

    first: the number of the first block.
    """
    return mixed_odd(np.arange(first, first + count, dtype=np.uint64), FACTOR_SEED)


@cache
def _factor(block: int) -> int:
    return int(factors(block, 1)[0])


def mixed_odd(values: UInt64s, seed: int = 0) -> UInt64s:
    """Return an odd pseudo-random number for each value: seed + (value + 1) * gamma, mixed by splitmix64 (Steele, Lea,
    Flood 2014; Vigna's constants)."""
    mixed: UInt64s = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
