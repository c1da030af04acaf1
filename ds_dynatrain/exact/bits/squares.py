"""A sum of squares of fp32 numbers that has no order: each square becomes two integers, and integers add up exactly.

A square is exact in fp64. All are rounded to one grid, which follows from the largest of them and from how many there
are, so that the sum of all fits into 64 bits; what rounding leaves over is rounded to a second grid below it:

    square = high * 2^(exponent - bits) + low * 2^(exponent - 2 bits) + an error below 2^(exponent - 2 bits - 1)

Whoever holds which numbers, the sums of `high` and `low` over all are the same (reproducible summation in bins, Demmel
and Nguyen 2013). Compiled (`transfer/weigh.c`) where that was built, else numpy's; both give the same integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import TransferError

try:
    from ds_dynatrain.transfer import weigh
except ImportError:  # it was installed where there is no C compiler
    weigh = None  # type: ignore[assignment]

Floats = npt.NDArray[np.float32]
MOST_BITS = 50
"""A whole number up to 2^51 can be rounded to by adding 1.5 * 2^52, which the compiled sum does."""
CHUNK = 1 << 15
"""Elements, 256 KiB in fp64."""


@dataclass(frozen=True)
class Grid:
    """exponent: every square is below 2^exponent. bits: of each of the two integers that a square becomes."""

    exponent: int
    bits: int

    @staticmethod
    def of(largest: float, count: int) -> Grid:
        """For `count` numbers on all ranks, whose largest absolute value is `largest`, finite and above 0.

        TransferError for another one, and for more than 2^60 numbers.
        """
        if not (0 < largest < math.inf) or not 0 < count <= 1 << 60:
            raise TransferError(f"no grid for squares of {count} numbers up to {largest}: both must be finite, above 0")
        return Grid(math.frexp(largest * largest)[1], min(MOST_BITS, 62 - count.bit_length()))

    def total(self, high: int, low: int) -> float:
        """The sum of squares that two sums of integers over all ranks stand for, rounded once."""
        return math.ldexp(float((high << self.bits) + low), self.exponent - 2 * self.bits)


def largest(values: Floats) -> float:
    """The largest absolute value, 0.0 of none; inf if one of them is inf or nan. values: 1-D and contiguous."""
    _check(values)
    return largest_in_numpy(values) if weigh is None else weigh.largest(values)


def square_sums(values: Floats, grid: Grid) -> tuple[int, int]:
    """The sums of (high, low) over values, which are 1-D and contiguous, and none above what the grid was made for."""
    _check(values)
    by = math.ldexp(1.0, grid.bits - grid.exponent), math.ldexp(1.0, grid.bits)
    return in_numpy(values, *by) if weigh is None else weigh.squares(values, *by)


def largest_in_numpy(values: Floats) -> float:
    """The same without a compiler."""
    found = float(np.abs(values).max(initial=np.float32(0)))
    return found if math.isfinite(found) else math.inf


def in_numpy(values: Floats, scale: float, bin_size: float) -> tuple[int, int]:
    """The same without a compiler. scale: by which a square becomes `high`; bin_size: one `high` in terms of `low`."""
    high = low = 0
    for start in range(0, values.size, CHUNK):
        squares = np.square(values[start : start + CHUNK].astype(np.float64)) * scale
        whole = np.rint(squares)
        high += int(whole.astype(np.int64).sum())
        low += int(np.rint((squares - whole) * bin_size).astype(np.int64).sum())
    return high, low


def _check(values: Floats) -> None:
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous:
        raise TransferError(
            f"squares are of 1-D contiguous fp32 values, got {values.dtype} of shape {values.shape}, strides "
            f"{values.strides}: convert and flatten first"
        )
