"""How many samples of a global batch each data index gets, and in how many micro-batches; `data.batch` says which."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.columns import Columns
from ds_dynatrain.space.layout import Layout


@dataclass(frozen=True)
class Deal:
    """Samples of a global batch; LayoutError for a share or a number of micro-batches below 1.

    shares: samples by data index. micro_batches: of the data index with the most samples, in one optimizer step.
    """

    shares: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.shares or min(self.shares) < 1:
            raise LayoutError(f"shares {self.shares}: each data index needs a sample; use fewer data ranks")
        if not 1 <= self.micro_batches <= max(self.shares):
            raise LayoutError(
                f"{self.micro_batches} micro-batches of {max(self.shares)} samples of a data rank: give 1 to "
                f"{max(self.shares)}"
            )

    @classmethod
    def of(
        cls, profile: Profile, layout: Layout, micro_batches: int | None = None, pipeline: bool | None = None
    ) -> Deal:
        """The deal of a layout; without a number in micro-batches as large as those timed.

        pipeline: whether the model is a PipelineModule, whose micro-batches have one size (`space.columns`); without
        it, whether there are several stages. LayoutError for shares that are not of all samples, and for a number of
        micro-batches that no size gives.
        """
        batch, data = profile.train_batch_size, layout.data
        dealt = layout.shares or tuple(batch // data + (k < batch % data) for k in range(data))
        if sum(dealt) != batch:
            raise LayoutError(
                f"shares {dealt} are {sum(dealt)} samples over {len(dealt)}: {batch} go over data={data}; give {data} "
                f"shares that are {batch} together"
            )
        if pipeline or (pipeline is None and layout.pipe > 1):
            return cls.in_columns(_columns(profile, layout, micro_batches))
        return cls(dealt, micro_batches or math.ceil(max(dealt) / profile.micro_batch_size))

    @classmethod
    def in_columns(cls, columns: Columns) -> Deal:
        """That of pipelines side by side."""
        return cls(columns.shares, columns.longest)

    @cached_property
    def size(self) -> float:
        """Samples of a micro-batch of the data index with the most."""
        return max(self.shares) / self.micro_batches

    @property
    def has_one_size(self) -> bool:
        """Whether shares are whole micro-batches of the size of the largest one's, as a pipeline's must be."""
        size, rest = divmod(max(self.shares), self.micro_batches)
        return not rest and not any(share % size for share in self.shares)

    @property
    def is_even(self) -> bool:
        """Whether all data indices have as many samples."""
        return min(self.shares) == max(self.shares)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches by data index where all have one size."""
        most = max(self.shares)
        return tuple(share * self.micro_batches // most for share in self.shares)


def _columns(profile: Profile, layout: Layout, micro_batches: int | None) -> Columns:
    """As a job would have them, of micro-batches of at most the size that was timed; or with so many in the longest."""
    given = profile.train_batch_size, layout.data, layout.shares
    if micro_batches is None:
        return Columns.of(given[0], profile.micro_batch_size, *given[1:])
    found = next((each for each in Columns.every(*given) if each.longest == micro_batches), None)
    if found is None:
        raise LayoutError(
            f"{layout}: no size of micro-batches gives the longest pipeline {micro_batches} of them out of {given[0]} "
            "samples; give another number, or leave it out"
        )
    return found


def shares_of(pace: Sequence[float], samples: int, first: Sequence[float] | None = None) -> tuple[int, ...]:
    """So many samples over data indices of different speeds, so that the last is done as early as it can be.

    One after the other goes to the index that would have it done first, the first of several: for a bottleneck of sums
    of equal parts that is optimal. first: when each begins; without it all at once. Each has one at least; LayoutError
    if there are too few.
    """
    if samples < len(pace):
        raise LayoutError(
            f"{samples} samples over {len(pace)} data indices: each needs one; take at most {samples} data ranks"
        )
    begins = [0.0] * len(pace) if first is None else first
    due = [(begins[index] + 2 / speed, index) for index, speed in enumerate(pace)]
    heapq.heapify(due)
    shares = [1] * len(pace)
    for _ in range(samples - len(pace)):
        _, index = due[0]
        shares[index] += 1
        heapq.heapreplace(due, (begins[index] + (shares[index] + 1) / pace[index], index))
    return tuple(shares)
