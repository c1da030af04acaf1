"""A clock that slows down what burns processor time, in place of a card's."""

from __future__ import annotations

from ds_dynatrain.clocks.actuator import Actuator


class Throttle(Actuator):
    """An actuator for processes on CPUs: what `burning.burn` does takes the longer, the lower the clock.

    share: the present clock, as a share of the highest one.
    """

    clocks = range(100, 2001, 100)
    share = 1.0
    fixed = 0.2
    """The part of the time that does not depend on the clock, as that of reading memory."""

    def set(self, clock: int) -> None:
        """Burn at this clock."""
        Throttle.share = clock / self.clocks[-1]

    def give_back(self) -> None:
        """Burn at the highest clock."""
        Throttle.share = 1.0

    @classmethod
    def longer(cls) -> float:
        """By how much burning takes longer than at the highest clock."""
        return cls.fixed + (1 - cls.fixed) / cls.share
