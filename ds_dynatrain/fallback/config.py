"""The `fallback` block of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_dynatrain.config import Block, File, Said, Size, Steps


class FallbackConfig(Block):
    """Automatic checkpoints, saved between two steps."""

    path: File
    """A folder that all members see."""
    every_steps: Steps | None = None
    """Save whenever the number of completed optimizer steps is a multiple of this number."""
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), Said("seconds")] | None = None
    """Save when the last checkpoint is this many seconds old, by the clock of rank 0."""
    background: bool = True
    """Whether the step waits only for a copy into host memory, which takes as many bytes as this member writes."""
    on_sigterm: bool = False
    """Whether SIGTERM to any member makes all members save at the next step and end with code 143. Elastic jobs do not
    need this."""
    keep: Size = 2
    """Number of the newest checkpoints kept in the folder."""
