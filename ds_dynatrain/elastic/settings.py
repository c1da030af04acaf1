"""Settings of the coordinator: numbers of nodes, and time limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ds_dynatrain.errors import ConfigError

ORPHAN_SECONDS = 30.0
"""How long a member continues without a coordinator. If the network between the two is cut, the coordinator declares
the member lost within this time."""


@dataclass(frozen=True)
class Settings:
    """How many nodes a job needs, and how long its coordinator waits for each kind of event.

    Raises ConfigError for invalid numbers.
    """

    min_nodes: int
    """Minimum number of nodes with which a job starts (MIN of `--nnodes=MIN:MAX`). A job with fewer nodes is paused."""
    max_nodes: int
    """Maximum number of nodes that train at once. Further nodes wait, ready to replace a node that leaves."""
    debounce_seconds: float = 0.05
    """How long to collect further events after the first sign of a change, before deciding on the next generation."""
    beat_seconds: float = 0.5
    """Interval between the heartbeats of every peer, in seconds."""
    silent_seconds: float = 5.0
    """Time without a heartbeat after which a member is declared lost."""
    stuck_seconds: float = 300.0
    """How long a training member's main thread may run no Python code before the member is declared lost; 0 for no
    limit. Time in which the thread waits for another process does not count."""
    recovery_seconds: float = 3.0
    """How long a restarted coordinator waits for members of a running job before it makes any decision.

    The time counts from the coordinator's start, and again from the return of each such member.
    """

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
