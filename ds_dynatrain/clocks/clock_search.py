"""The bisection that finds the clocks of all ranks from the seconds for which they compute.

A clock is given by its place among the supported clocks, from the lowest. A rank that computes longer at a lower clock
limits the step as soon as it computes longer than the slowest rank, which keeps the highest clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LIMITS_NOT_YET = -1
"""The place below the lowest clock."""


@dataclass(frozen=True)
class ClockSearch:
    """The state of the search, which is the same on all members. `after` returns the next state.

    clocks: the supported clocks, lowest first.
    enough: for each rank, the lowest known place at which it does not limit the step.
    limits: for each rank, the highest known place at which it limits the step; -1 if none is known.
    slowest: the ranks that keep the highest clock; () before the first window.
    """

    clocks: tuple[int, ...]
    enough: tuple[int, ...]
    limits: tuple[int, ...]
    slowest: tuple[int, ...] = ()

    @classmethod
    def begun(cls, clocks: Sequence[int], ranks: int) -> ClockSearch:
        """Return the state in which all ranks have the highest clock, and no window has been measured yet."""
        return cls(tuple(clocks), (len(clocks) - 1,) * ranks, (LIMITS_NOT_YET,) * ranks)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each rank's clock for the next window: halfway between those that limit and those that do
        not."""
        if not self.slowest:
            return self.enough
        return tuple((low + high) // 2 if high - low > 1 else high for low, high in self._spans)

    @property
    def is_over(self) -> bool:
        """Whether the clock of every rank is known."""
        return bool(self.slowest) and all(high - low == 1 for low, high in self._spans)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.limits, self.enough, strict=True))

    def after(self, seconds: Sequence[float], least: float) -> ClockSearch:
        """Return the state after one more window, in which the ranks had the clocks of `places`.

        seconds: for which each rank computed.
        least: the share of the slowest rank's seconds below which a difference does not count in the first window.
        """
        if not self.slowest:
            bound = (1 - least) * max(seconds)
            slowest = tuple(rank for rank, each in enumerate(seconds) if each >= bound)
            top = len(self.clocks) - 1
            limits = tuple(top - 1 if rank in slowest else LIMITS_NOT_YET for rank in range(len(seconds)))
            return replace(self, limits=limits, slowest=slowest)
        bound = max(seconds[rank] for rank in self.slowest)
        tried = list(zip(self.places, seconds, self._spans, strict=True))
        enough = tuple(place if each <= bound and place < high else high for place, each, (_, high) in tried)
        limits = tuple(place if each > bound and place < high else low for place, each, (low, high) in tried)
        return replace(self, enough=enough, limits=limits)

    def predicted(self, seconds: Sequence[float]) -> list[float]:
        """Return the seconds of each rank at the clocks of `places` if they grow as clocks fall, which is the most.

        seconds: at the highest clock.
        """
        return [each * (self.clocks[-1] / self.clocks[place]) for each, place in zip(seconds, self.places, strict=True)]


def waiting(seconds: Sequence[float]) -> float:
    """Return how long the ranks wait for the slowest one on average, as a share of its seconds."""
    return 1 - sum(seconds) / len(seconds) / max(seconds)
