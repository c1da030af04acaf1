"""Numbers by which a coordinator decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ds_dynatrain.errors import ConfigError

ORPHAN_SECONDS = 30.0
"""How long a member goes on without a coordinator; if the network is cut, the other side has given it up by then."""


@dataclass(frozen=True)
class Settings:
    """How many nodes a job wants, and how long the coordinator waits for what. ConfigError for impossible numbers."""

    min_nodes: int
    """Fewest nodes that a job starts with (MIN of `--nnodes=MIN:MAX`); a job with fewer is paused."""
    max_nodes: int
    """The most nodes that train; further ones wait, ready to take the place of one that goes."""
    debounce_seconds: float = 0.05
    """How long to collect further events, after the first sign of a change, before deciding."""
    beat_seconds: float = 0.5
    """Interval of every peer's heartbeats."""
    silent_seconds: float = 5.0
    """Silence after which a member is given up."""
    stuck_seconds: float = 300.0
    """A member of the world is given up when its main thread has run no Python code for this long and waits for no
    other process; 0: never."""
    recovery_seconds: float = 3.0
    """How long a coordinator waits, after its start and after each member of a running job that returns, for the
    remaining members before it decides anything."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"--nnodes={self.min_nodes}:{self.max_nodes}: 1 <= MIN <= MAX has to hold; give --nnodes=MIN:MAX, for "
                "example 2:8"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{field.name} is {value!r}; give a number of at least 0")
        for name in ("silent_seconds", "stuck_seconds"):
            seconds, is_off = getattr(self, name), name == "stuck_seconds" and self.stuck_seconds == 0
            if not is_off and (self.beat_seconds <= 0 or seconds < 3 * self.beat_seconds):
                raise ConfigError(
                    f"{name}: {seconds:g} s hold fewer than three heartbeats of {self.beat_seconds:g} s, and a busy "
                    f"machine would lose members; give at least {3 * self.beat_seconds:g}"
                )
