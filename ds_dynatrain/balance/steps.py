"""How long steps take by the clock: the middle one of the last few, and its standard error."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.balance.window import OF_DEVIATION, OF_MEDIAN

REMEMBERED = 16
"""Steps; what was before them may have had other costs."""


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, the middle one of `count`. error: its standard error, in seconds."""

    seconds: float
    error: float
    count: int


class StepSeconds:
    """The last steps on one member, in one layout."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        """One more step."""
        self._seconds.append(seconds)

    def forget(self, but: int = 0) -> None:
        """What follows is another layout, or other members; or other costs, which the newest so many steps had, too."""
        while len(self._seconds) > but:
            self._seconds.popleft()

    def measured(self, newest: int | None = None) -> Measured:
        """Of the newest so many; all by default. What spreads them is taken from all, as a share of the middle one.

        A single step says nothing of its error, which is then all of it.
        """
        known = np.array(self._seconds, dtype=np.float64)
        if not len(known):
            return Measured(0.0, 0.0, 0)
        used = known if newest is None else known[-newest:]
        middle, whole = float(np.median(used)), float(np.median(known))
        if len(known) == 1 or not whole:
            return Measured(middle, middle, len(used))
        spread = OF_DEVIATION * float(np.median(np.abs(known - whole))) / whole
        return Measured(middle, OF_MEDIAN * spread * middle / math.sqrt(len(used)), len(used))
