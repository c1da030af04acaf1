"""A sum of squares of fp32 numbers whose result does not depend, even in the last bit, on the order of the numbers.

Each square becomes two integers, whose sums are exact. A square is exact in fp64. All squares are rounded to one grid,
which follows from the largest square and from the number of squares, so that the sum of all fits into 64 bits. The
remainder is rounded to a second, finer grid:

    square = high * 2^(exponent - bits) + low * 2^(exponent - 2 bits) + an error below 2^(exponent - 2 bits - 1)

The sums of `high` and `low` over all ranks do not depend on which rank holds which numbers (reproducible summation in
bins, Demmel and Nguyen 2013). They are computed by C (`transfer/weigh.c`) if that was built, otherwise by numpy. Both
give the same integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import TransferError

try:
    from ds_dynatrain.transfer import weigh
except ImportError:  # the package was installed without a C compiler
    weigh = None  # type: ignore[assignment]

Floats = npt.NDArray[np.float32]
MOST_BITS = 50
"""Upper limit of `Grid.bits`. Adding 1.5 * 2^52, as the compiled sum does, rounds to whole numbers only up to 2^51."""
CHUNK = 1 << 15
"""Number of elements that are squared at once: 256 KiB in fp64."""


@dataclass(frozen=True)
class Grid:
    """The grid to which squares are rounded.

    exponent: every square is below 2^exponent.
    bits: the number of bits of each of the two integers that a square becomes.
    """

    exponent: int
    bits: int

    @staticmethod
    def of(largest: float, count: int) -> Grid:
        """Return the grid for `count` numbers over all ranks.

        largest: their largest absolute value, which must be finite and above 0.

        Raises TransferError if `largest` is invalid, and unless there are 1 to 2^60 numbers.
        """
        if not (0 < largest < math.inf) or not 0 < count <= 1 << 60:
            raise TransferError(f"no grid for squares of {count} numbers up to {largest}: both must be finite, above 0")
        return Grid(math.frexp(largest * largest)[1], min(MOST_BITS, 62 - count.bit_length()))

    def total(self, high: int, low: int) -> float:
        """Return the sum of squares that these two sums of integers represent, rounded once.

        high: the sum of `high` over all ranks.
        low: the sum of `low` over all ranks.
        """
        return math.ldexp(float((high << self.bits) + low), self.exponent - 2 * self.bits)


def largest(values: Floats) -> float:
    """Return the largest absolute value; 0.0 if there are no values, and inf if one is inf or nan.

    values: a 1-D contiguous array.
    """
    _check(values)
    return largest_in_numpy(values) if weigh is None else weigh.largest(values)


def square_sums(values: Floats, grid: Grid) -> tuple[int, int]:
    """Return the sums of the integers (high, low) to which the squares of the values are rounded.

    values: a 1-D contiguous array. No absolute value in it may exceed the largest one for which the grid was made.
    """
    _check(values)
    by = math.ldexp(1.0, grid.bits - grid.exponent), math.ldexp(1.0, grid.bits)
    return in_numpy(values, *by) if weigh is None else weigh.squares(values, *by)


def largest_in_numpy(values: Floats) -> float:
    """Return the same result as `largest`, computed without the C module."""
    found = float(np.abs(values).max(initial=np.float32(0)))
    return found if math.isfinite(found) else math.inf


def in_numpy(values: Floats, scale: float, bin_size: float) -> tuple[int, int]:
    """Return the same result as `square_sums`, computed without the C module.

    scale: the factor that turns a square into `high`.
    bin_size: one unit of `high`, in units of `low`.
    """
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
