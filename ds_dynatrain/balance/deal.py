"""The samples of a global batch that each rank of a layout gets, and the rank's peak bytes, computed from a profile.

State is partitioned as in `space.zero`: stage 3 partitions weights, and stages 1 to 3 masters and moments. If weight
and master are the same bytes (fp32), stages 0 and 3 hold them once. Gradients have the dtype of the weights, and are
partitioned from stage 2 on. During the optimizer step, gradients are also held in the dtype of the masters, and
partitioned like them. Activations are held for each micro-batch in flight. All numbers except the gathered weights of
stage 3 are sums over layers, so `partition` can take them into account.

A profile describes layers, not tensors. A layer's bytes count in full at each index of the tensor and expert axes,
which is too much if these axes partition the layer. The buffers of DeepSpeed's reductions and the allocator's losses
are not included.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_dynatrain.balance.profile import Ints, Profile
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.columns import Columns
from ds_dynatrain.space.kind import MASTER, WEIGHT
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.zero import group_size


@dataclass(frozen=True)
class Deal:
    """A division of the samples of a global batch.

    shares: the number of samples of each data index.
    micro_batches: the number of micro-batches in one optimizer step, on the data index with the most samples.
    """

    shares: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        """Raise LayoutError if a share is below 1, or the number of micro-batches is below 1 or above every share."""
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
        """Return how a layout divides the samples of a global batch over data ranks and micro-batches.

        micro_batches: the number of micro-batches; None for micro-batches as large as the timed ones.
        pipeline: whether the model is a PipelineModule, whose micro-batches have one size (`space.columns`). None
            assumes that it is one if there are several stages.

        Raises LayoutError if the shares do not add up to all samples, or if no size gives this number of micro-batches.
        """
        batch, data = profile.train_batch_size, layout.data
        dealt = layout.shares or tuple(batch // data + (k < batch % data) for k in range(data))
        if sum(dealt) != batch:
            raise LayoutError(
                f"shares {dealt} are {sum(dealt)} samples over {len(dealt)}: {batch} go over data={data}; give {data} "
                f"shares that are {batch} together"
            )
        if not pipeline and (pipeline is False or layout.pipe == 1):
            return cls(dealt, micro_batches or math.ceil(max(dealt) / profile.micro_batch_size))
        if micro_batches is None:
            columns = Columns.of(batch, profile.micro_batch_size, data, layout.shares)
        else:
            every = Columns.every(batch, data, layout.shares)
            found = next((each for each in every if each.longest == micro_batches), None)
            if found is None:
                raise LayoutError(
                    f"{layout}: no size of micro-batches gives the longest pipeline {micro_batches} of them out of "
                    f"{batch} samples; give another number, or leave it out"
                )
            columns = found
        return cls(columns.shares, columns.longest)

    @cached_property
    def size(self) -> float:
        """Samples in a micro-batch at the data index with the largest share."""
        return max(self.shares) / self.micro_batches

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of micro-batches at each data index, if all micro-batches have one size."""
        most = max(self.shares)
        return tuple(share * self.micro_batches // most for share in self.shares)


def shares_of(pace: Sequence[float], samples: int, first: Sequence[float] | None = None) -> tuple[int, ...]:
    """Divide samples over data indices of different speeds, so that the last one finishes as early as possible.

    pace: the speed of each data index.
    samples: the number of samples.
    first: the seconds at which each index begins; None if all begin at once.

    Each sample in turn goes to the index that would finish it first; a tie goes to the lowest index. This is optimal if
    a bottleneck is a sum of equal parts. Every index gets at least one sample. Raises LayoutError if there are too few
    samples.
    """
    if samples < len(pace):
        raise LayoutError(
            f"{samples} samples over {len(pace)} data indices: each needs one; take at most {samples} data ranks"
        )
    begins = first or [0.0] * len(pace)
    due = [(begins[index] + 2 / speed, index) for index, speed in enumerate(pace)]
    heapq.heapify(due)
    shares = [1] * len(pace)
    for _ in range(samples - len(pace)):
        _, index = due[0]
        shares[index] += 1
        heapq.heapreplace(due, (begins[index] + (shares[index] + 1) / pace[index], index))
    return tuple(shares)


def peak_bytes(profile: Profile, layout: Layout, deal: Deal) -> tuple[int, ...]:
    """Return the peak bytes of a rank on each stage. Raises LayoutError if the boundaries do not fit the layers."""
    cut, gathered = itertools.pairwise(cut_of(profile, layout)), gathered_bytes(profile, layout)
    taken = taken_bytes(profile, layout, deal)
    return tuple(int(line[start:stop].sum()) + gathered for line, (start, stop) in zip(taken, cut, strict=True))


def taken_bytes(profile: Profile, layout: Layout, deal: Deal) -> Ints:
    """Return [stages, layers]: the bytes that each layer would take on a rank of each stage."""
    stages = range(layout.pipe)
    flights = np.array([in_flight(layout.pipe, deal.micro_batches, stage) for stage in stages])
    one = profile.counts("activation_bytes") * (deal.size / profile.micro_batch_size)
    activations = np.asarray(np.ceil(flights[:, None] * one[None, :]), dtype=np.int64)
    return activations + sum(state_of(profile, layout))


def gathered_bytes(profile: Profile, layout: Layout) -> int:
    """Return the peak bytes of gathered weights in ZeRO stage 3; 0 in other stages.

    A layer's weights are held together with those of the next layer, which are fetched ahead.
    """
    if layout.zero_stage < 3:
        return 0
    weights = np.append(profile.kind_bytes(WEIGHT), 0)
    return int((weights[:-1] + weights[1:]).max())


def cut_of(profile: Profile, layout: Layout) -> tuple[int, ...]:
    """Return the first layer of each stage of a layout, followed by the number of layers.

    Raises LayoutError if a layout with several stages has no boundaries, or if they do not fit the layers.
    """
    layers = len(profile.layers)
    cut = layout.boundaries or ((0, layers) if layout.pipe == 1 else ())
    if not cut or cut[-1] != layers:
        raise LayoutError(f"{layout}: give boundaries that end with {layers}, the number of layers in the profile")
    return cut


def in_flight(stages: int, micro_batches: int, stage: int) -> int:
    """Return the largest number of micro-batches for which a stage holds activations at the same time.

    Activations are held from a micro-batch's forward pass to its backward pass.
    """
    return min(stages - stage, micro_batches)


def state_of(profile: Profile, layout: Layout) -> tuple[Ints, Ints, Ints]:
    """Return three arrays [layers]: the bytes of weights, of other state kinds, and of gradients on a rank."""
    ranks, stage = group_size(layout), layout.zero_stage
    weight, master = profile.kind_bytes(WEIGHT), profile.kind_bytes(MASTER)
    shared = (weight == master) & (stage in (0, 3))
    others = profile.counts("total_bytes") - weight - np.where(shared, master, 0)
    gradient, stepped = np.where(profile.trained, weight, 0), np.where(shared, 0, master)
    whole = ranks if stage >= 1 else 1
    gradients = _parts(gradient, ranks if stage >= 2 else 1) + _parts(stepped, whole)
    return _parts(weight, ranks if stage == 3 else 1), _parts(others, whole), gradients


def _parts(values: Ints, ranks: int) -> Ints:
    return np.asarray(-(-values // ranks), dtype=np.int64)
