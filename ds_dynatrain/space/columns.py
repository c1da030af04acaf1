"""How many micro-batches each column of a pipeline runs; all have one size, as stages send buffers of one size.

A column is a data index of a pipeline: one rank of each stage. Columns meet only after their last micro-batch, where
gradients are reduced, so they may run different numbers of them. The gradient stays the mean over all micro-batches:
each column divides by the mean number of a column,

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
    """Numbers of micro-batches that the columns of a pipeline run in a global batch.

    size: samples of each micro-batch. counts: micro-batches of each column; LayoutError if one has none.
    """

    size: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise LayoutError for a size or a count below 1, or for no column at all."""
        if self.size < 1 or not self.counts or min(self.counts) < 1:
            raise LayoutError(
                f"columns of {self.counts} micro-batches of {self.size} samples: each has one at least; give 1 or more"
            )

    @classmethod
    def of(cls, samples: int, limit: int, columns: int, shares: tuple[int, ...] | None = None) -> Columns:
        """Deal `samples` in micro-batches of at most `limit` over the columns, by `shares` or as evenly as possible.

        Among the sizes that divide the samples (every share), choose the one with the fewest micro-batches in the
        longest column, and among equals the smallest. Raise LayoutError if there are fewer samples than columns.
        """
        fitting = itertools.takewhile(lambda each: each.size <= limit, cls.every(samples, columns, shares))
        return min(fitting, key=lambda each: (each.longest, each.size))

    @classmethod
    def every(cls, samples: int, columns: int, shares: tuple[int, ...] | None = None) -> Iterator[Columns]:
        """Yield the columns for every possible size of a micro-batch, smallest first; LayoutError as in `of`."""
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
        """Micro-batches of the longest column."""
        return max(self.counts)

    @property
    def total(self) -> int:
        """Micro-batches of a global batch."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean number of micro-batches of a column; each column divides the sum of its losses by it."""
        return self.total / len(self.counts)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each column."""
        return tuple(self.size * count for count in self.counts)

    @property
    def is_even(self) -> bool:
        """Whether all columns run the same number of micro-batches."""
        return min(self.counts) == self.longest
