"""What a switch costs in seconds, from those that were made: a fixed part, and a part that goes with the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.errors import ConfigError

RECENT = 16
"""Switches that count; older ones were made with other neighbours on the machine."""


@dataclass(frozen=True)
class Pause:
    """seconds = fixed_seconds + seconds_per_byte x bytes moved; ConfigError for a number below 0 or not finite."""

    fixed_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        """Check both."""
        for value in (self.fixed_seconds, self.seconds_per_byte):
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"a pause of {self.fixed_seconds} s + {self.seconds_per_byte} s per byte; give numbers that are "
                    "not below 0"
                )

    def seconds(self, nbytes: float) -> float:
        """Of a switch that moves so many bytes."""
        return self.fixed_seconds + self.seconds_per_byte * nbytes

    def fitted(self, made: Sequence[tuple[int, float]]) -> Pause:
        """This one, corrected by the switches that were made: (bytes moved, seconds) of each, the last one last.

        Least squares with neither part below 0. Where all moved equally many bytes only the fixed part is corrected,
        since nothing tells the two apart.
        """
        if not made:
            return self
        sizes, took = (np.array(each, dtype=np.float64) for each in zip(*made[-RECENT:], strict=True))
        if np.ptp(sizes) == 0:
            return Pause(max(0.0, float((took - self.seconds_per_byte * sizes).mean())), self.seconds_per_byte)
        away = sizes - sizes.mean()
        slope = float((away * took).sum() / (away**2).sum())
        fixed = float(took.mean() - slope * sizes.mean())
        if slope < 0:
            return Pause(float(took.mean()), 0.0)
        if fixed < 0:
            return Pause(0.0, float((sizes * took).sum() / (sizes**2).sum()))
        return Pause(fixed, slope)
