"""Bisection that finds, for each rank, the lowest clock at which the rank does not delay the step.

A clock is given by its index among the supported clocks, lowest first. A rank computes longer at a lower clock, and
limits the step once it computes longer than the slowest rank, which keeps the highest clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LIMITS_NOT_YET = -1
"""The index used while no clock is known to be too low."""


@dataclass(frozen=True)
class ClockSearch:
    """State of the search for the clocks of all ranks, equal on all members. `after` returns the next state.

    clocks: the supported clocks, lowest first.
    enough: the index, for each rank, of the lowest clock known not to limit the step.
    limits: the index, for each rank, of the highest clock known to limit the step; -1 if none is known.
    slowest: the ranks that keep the highest clock; () before the first timing window has ended.
    """

    clocks: tuple[int, ...]
    enough: tuple[int, ...]
    limits: tuple[int, ...]
    slowest: tuple[int, ...] = ()

    @classmethod
    def begun(cls, clocks: Sequence[int], ranks: int) -> ClockSearch:
        """Return the initial state: all ranks have the highest clock, and nothing has been measured yet."""
        return cls(tuple(clocks), (len(clocks) - 1,) * ranks, (LIMITS_NOT_YET,) * ranks)

    @property
    def places(self) -> tuple[int, ...]:
        """The index of each rank's clock in the next timing window: halfway between the highest clock known to be too
        low and the lowest clock known to be sufficient."""
        if not self.slowest:
            return self.enough
        return tuple((low + high) // 2 if high - low > 1 else high for low, high in self._spans)

    @property
    def is_over(self) -> bool:
        """Whether the search has found the clock of every rank."""
        return bool(self.slowest) and all(high - low == 1 for low, high in self._spans)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.limits, self.enough, strict=True))

    def after(self, seconds: Sequence[float], least: float) -> ClockSearch:
        """Return the state after one more timing window, in which the ranks had the clocks of `places`.

        seconds: the compute time of each rank.
        least: the first window counts every rank as slowest whose time is within this fraction of the longest.
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
        """Return an upper bound on the compute time of each rank, in seconds, at the clocks of `places`.

        The bound assumes that time is inversely proportional to the clock.
        seconds: the compute times at the highest clock.
        """
        return [each * (self.clocks[-1] / self.clocks[place]) for each, place in zip(seconds, self.places, strict=True)]


def waiting(seconds: Sequence[float]) -> float:
    """Return how long ranks wait for the slowest rank on average, as a fraction of the slowest rank's time."""
    return 1 - sum(seconds) / len(seconds) / max(seconds)
