"""Seconds that a step of a layout takes at the least, whatever its boundaries are: most layouts need no closer look.

A stage makes its passes, then reduces; all stages have reduced before any of them steps, then gathers. So a step takes
at the least the largest of a stage's first two, and the largest of its last two; and the largest of several stages is
no less than their mean, of which the layers alone decide.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.links import Link
from ds_dynatrain.balance.profile import Floats, Profile
from ds_dynatrain.space.kind import WEIGHT
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.zero import group_size

_ROUNDING = 1 - 1e-9
"""Some bounds are tight, and sums of the same numbers in another order differ in their last digits."""


@dataclass(frozen=True, eq=False)
class Bound:
    """Of a profile's layers on these members. speeds: of all of them. link: the fastest between any two."""

    profile: Profile
    speeds: Sequence[float]
    link: Link

    def of_size(self, pipe: int, data: int) -> float:
        """Of every layout with so many stages and data ranks.

        The members' time together, and the largest layer for the mean share of samples.
        """
        batch = self.profile.train_batch_size / self.profile.micro_batch_size
        together = self._passes.sum() / self._fastest[pipe * data - 1]
        return float(batch * max(together, self._passes.max() / data / self._fastest[0])) * _ROUNDING

    def of(self, layout: Layout, deal: Deal, pace: Floats) -> float:
        """Of one layout. pace: [stages, data], speeds at each place."""
        whole, place = pace.sum(axis=0), layout.pipe * pace.min(axis=0)
        reduced = (self._compute(deal) + place * self._reduction(layout, deal)) / whole
        return max(float(reduced.max()), self.of_passes(layout, deal, pace)) + self._after(layout, deal, pace)

    def of_any_shares(self, layout: Layout, deal: Deal, pace: Floats) -> float:
        """The same for all shares of as many micro-batches in all: of all data ranks together."""
        whole, place = pace.sum(axis=0), layout.pipe * pace.min(axis=0)
        reduced = (self._compute(deal) + place * self._reduction(layout, deal)).sum() / whole.sum()
        return float(reduced) * _ROUNDING + self._after(layout, deal, pace)

    def of_passes(self, layout: Layout, deal: Deal, pace: Floats) -> float:
        """Until they are made: stages share the layers, one has the largest, and a pipeline fills and empties.

        Stage s begins after those before it, which end after it if a gradient comes back to them. Of all loads with
        n l_s + l_0 + ... + l_(s-1) <= T for n micro-batches and each s, those that add up to most have equality
        throughout: T (1 - (1 - 1/n)^stages).
        """
        samples, fastest = self._samples(deal), pace.max(axis=0)
        numbers = np.maximum(deal.counts, 1)
        filling = self._sums[-1] / (1 - (1 - 1 / numbers) ** layout.pipe) / numbers
        alone = samples * np.maximum(self._passes.max(), filling) / fastest
        return float(np.maximum(alone, self._compute(deal) / pace.sum(axis=0)).max()) * _ROUNDING

    def is_beyond(self, seconds: float, layout: Layout, deal: Deal, pace: Floats) -> bool:
        """Whether no boundaries at all make a step of so many seconds: asked of one layout, and so closer than `of`.

        Stage s of n micro-batches and the layers from k on is done n l_s + (l_0 + ... + l_(s-1)) after the start at the
        least, which with sums S is n (S_stop - S_k) + S_k: each stage may reach as far as it can.
        """
        left = (seconds - self._after(layout, deal, pace)) / _ROUNDING
        alone = self._samples(deal) / pace.max(axis=0)
        slowest = int(alone.argmax())
        number = max(deal.counts[slowest], 1)
        room = left * number / alone[slowest]  # seconds of layers of one micro-batch as it was timed
        done = 0.0
        for _ in range(layout.pipe):
            reach = bisect.bisect_right(self._sums, done + (room - done) / number * (1 + 1e-12))
            done = self._sums[max(reach - 1, 0)]
        return done < self._sums[-1]

    def _samples(self, deal: Deal) -> Floats:
        """[data]: in micro-batches as they were timed."""
        return np.array(deal.shares) / self.profile.micro_batch_size

    def _compute(self, deal: Deal) -> Floats:
        """[data]: seconds of all layers together."""
        return np.asarray(self._samples(deal) * self._passes.sum())

    def _after(self, layout: Layout, deal: Deal, pace: Floats) -> float:
        """From the reductions to the end: the mean of a stage."""
        stepped = self._stepped / (group_size(layout) if layout.zero_stage else 1)
        whole, place = pace.sum(axis=0), layout.pipe * pace.min(axis=0)
        return float(((stepped + place * self._gather(layout, deal)) / whole).max()) * _ROUNDING

    def _reduction(self, layout: Layout, deal: Deal) -> float:
        """The mean of a stage."""
        ranks, nbytes = group_size(layout), self._trained_bytes / layout.pipe
        if layout.zero_stage == 3:
            return deal.micro_batches * self.link.gather(nbytes, ranks)
        return (1 if layout.zero_stage < 2 else deal.micro_batches) * self.link.reduce(nbytes, ranks)

    def _gather(self, layout: Layout, deal: Deal) -> float:
        """The mean of a stage; of what stage 3 gathers once for each micro-batch."""
        if layout.zero_stage == 0:
            return 0.0
        ranks = group_size(layout)
        if layout.zero_stage == 3:
            return deal.micro_batches * self.link.gather(self._bytes / layout.pipe, ranks)
        return self.link.gather(self._trained_bytes / layout.pipe, ranks)

    @cached_property
    def _fastest(self) -> Floats:
        """What the fastest 1, 2, ... members do in a second."""
        return np.cumsum(np.sort(np.array(self.speeds))[::-1])

    @cached_property
    def _passes(self) -> Floats:
        return self.profile.seconds("forward_seconds") + self.profile.seconds("backward_seconds")

    @cached_property
    def _sums(self) -> list[float]:
        """Seconds of the first 0, 1, ... layers, without backward passes that wait for nobody."""
        waits = np.logical_or.accumulate(self.profile.trained)
        backward = np.where(waits, self.profile.seconds("backward_seconds"), 0.0)
        return [0.0, *np.cumsum(self.profile.seconds("forward_seconds") + backward).tolist()]

    @cached_property
    def _stepped(self) -> float:
        return float(np.where(self.profile.trained, self.profile.seconds("optimizer_seconds"), 0.0).sum())

    @cached_property
    def _bytes(self) -> float:
        return float(self.profile.kind_bytes(WEIGHT).sum())

    @cached_property
    def _trained_bytes(self) -> float:
        return float(np.where(self.profile.trained, self.profile.kind_bytes(WEIGHT), 0).sum())
