"""Settings of the coordinator: numbers of nodes, and how long it waits for what."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ds_dynatrain.errors import ConfigError

ORPHAN_SECONDS = 30.0
"""How long a member continues without a coordinator. If the network is cut, the other side has given the member up by
then."""


@dataclass(frozen=True)
class Settings:
    """How many nodes a job needs, and how long its coordinator waits for what.

    Raises ConfigError for impossible numbers.
    """

    min_nodes: int
    """The fewest nodes with which a job starts (MIN of `--nnodes=MIN:MAX`). A job with fewer is paused."""
    max_nodes: int
    """The most nodes that train at once. Further nodes wait, ready to replace one that leaves."""
    debounce_seconds: float = 0.05
    """How long to collect further events after the first sign of a change, before deciding."""
    beat_seconds: float = 0.5
    """Interval between the heartbeats of every peer, in seconds."""
    silent_seconds: float = 5.0
    """Time without a heartbeat after which a member is given up."""
    stuck_seconds: float = 300.0
    """How long the main thread of a member of the world may run no Python code, while it waits for no other process,
    before the member is given up; 0 for no limit."""
    recovery_seconds: float = 3.0
    """How long a coordinator waits for further members of a running job before it decides anything.

    The time counts from the coordinator's start and from the return of each such member.
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
