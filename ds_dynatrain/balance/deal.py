"""How many samples of a global batch each data index gets, and in how many micro-batches; `data.batch` says which."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.errors import LayoutError
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
    def of(cls, profile: Profile, layout: Layout, micro_batches: int | None = None) -> Deal:
        """The deal of a layout; without a number in micro-batches as large as those timed.

        LayoutError for shares that are not of all samples.
        """
        batch, data = profile.train_batch_size, layout.data
        dealt = layout.shares or tuple(batch // data + (k < batch % data) for k in range(data))
        if sum(dealt) != batch:
            raise LayoutError(f"shares {dealt} are {sum(dealt)} samples over {len(dealt)}: {batch} go over data={data}")
        return cls(dealt, micro_batches or math.ceil(max(dealt) / profile.micro_batch_size))

    @property
    def size(self) -> float:
        """Samples of a micro-batch of the data index with the most."""
        return max(self.shares) / self.micro_batches

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of all data indices have the same size, as a pipeline's must have."""
        return min(self.shares) == max(self.shares) and max(self.shares) % self.micro_batches == 0

    def pipeline_counts(self) -> tuple[int, ...]:
        """Micro-batches by data index where all have one size, the last one filled up with borrowed samples."""
        return tuple(math.ceil(share * self.micro_batches / max(self.shares)) for share in self.shares)


def shares_of(pace: Sequence[float], samples: int) -> tuple[int, ...]:
    """So many samples over data indices of different speeds, so that the last is done as early as it can be.

    One after the other goes to the index that would have it done first, the first of several: for a bottleneck of sums
    of equal parts that is optimal. Each has one at least; LayoutError if there are too few.
    """
    if samples < len(pace):
        raise LayoutError(f"{samples} samples over {len(pace)} data indices: each needs one")
    due = [(2 / speed, index) for index, speed in enumerate(pace)]
    heapq.heapify(due)
    shares = [1] * len(pace)
    for _ in range(samples - len(pace)):
        _, index = due[0]
        shares[index] += 1
        heapq.heapreplace(due, ((shares[index] + 1) / pace[index], index))
    return tuple(shares)
