"""How many micro-batches each pipeline replica (column) runs.

A column has one rank of each stage: those with the same index on the data axis. All micro-batches have the same size,
because stages send buffers of one size. Columns communicate only after their last micro-batch, when gradients are
reduced, so they may run different numbers n_c of micro-batches. The gradient is still the mean over all n
micro-batches, because each column divides its sum by the mean number of micro-batches per column, n/columns:

    gradient = 1/columns * sum over columns of (columns/n * sum of the gradients of its micro-batches)
             = 1/n * sum over all n micro-batches
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ds_dynatrain.errors import LayoutError


@dataclass(frozen=True)
class Columns:
    """The number of micro-batches that each pipeline replica (column) runs in a global batch.

    size: number of samples in each micro-batch.
    counts: number of micro-batches of each replica.
    """

    size: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise LayoutError if there is no pipeline replica, or if the micro-batch size or a count is below 1."""
        if self.size < 1 or not self.counts or min(self.counts) < 1:
            raise LayoutError(
                f"columns of {self.counts} micro-batches of {self.size} samples: each has one at least; give 1 or more"
            )

    @classmethod
    def of(cls, samples: int, limit: int, columns: int, shares: tuple[int, ...] | None = None) -> Columns:
        """Divide `samples` over pipeline replicas such that the busiest replica has the fewest micro-batches.

        Ties go to the smallest micro-batch size. The size must divide all samples (or every share).

        limit: the largest micro-batch size allowed.
        columns: the number of pipeline replicas.
        shares: the number of samples of each replica; None divides the samples as evenly as possible.

        Raises LayoutError if there are fewer samples than replicas.
        """
        fitting = itertools.takewhile(lambda each: each.size <= limit, cls.every(samples, columns, shares))
        return min(fitting, key=lambda each: (each.longest, each.size))

    @classmethod
    def every(cls, samples: int, columns: int, shares: tuple[int, ...] | None = None) -> Iterator[Columns]:
        """Yield a division of `samples` over pipeline replicas for each possible micro-batch size, smallest size first.

        columns: the number of pipeline replicas.
        shares: the number of samples of each replica; None divides the samples as evenly as possible.

        Raises LayoutError if there are fewer samples than replicas.
        """
        if samples < columns:
            raise LayoutError(
                f"{samples} samples over {columns} columns: each needs one; take at most {samples} pipelines side by "
                "side"
            )
        common = samples if shares is None else math.gcd(*shares)
        for size in range(1, samples // columns + 1):
            if common % size:
                continue
            if shares is not None:
                yield cls(size, tuple(share // size for share in shares))
            else:
                each, more = divmod(samples // size, columns)
                yield cls(size, tuple(each + (column < more) for column in range(columns)))

    @property
    def longest(self) -> int:
        """Largest number of micro-batches that a pipeline replica runs."""
        return max(self.counts)

    @property
    def total(self) -> int:
        """Number of micro-batches in a global batch, over all pipeline replicas."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean number of micro-batches per pipeline replica; each replica divides the sum of its losses by it."""
        return self.total / len(self.counts)

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of samples of each pipeline replica."""
        return tuple(self.size * count for count in self.counts)

    @property
    def is_even(self) -> bool:
        """Whether all pipeline replicas run the same number of micro-batches."""
        return min(self.counts) == self.longest
