"""The `buddies` block of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import model_validator

from ds_dynatrain.config import BLOCK, Block, Said, Size, Steps
from ds_dynatrain.errors import ConfigError


class BuddiesConfig(Block):
    """Copies, in other members' memory, of state that only one rank holds, for jobs whose members come and go."""

    mode: Annotated[Literal["off", "copy"] | None, Said(default='"copy" in an elastic job, else "off"')] = None
    """Whether other members keep copies; `None`: in an elastic job of two or more nodes, if half of the free memory
    suffices."""
    every_steps: Steps = 1
    """Number of steps between two copies."""
    copies: Annotated[Size, Said("members")] = 1
    """How many other members keep each copy; a job must start with more members than that."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, block: Any) -> Any:
        """Raise ConfigError for values that earlier versions accepted. The error says why they were removed, and what
        to use."""
        given = block if isinstance(block, Mapping) else {}
        if (mode := given.get("mode")) in ("replay", "auto"):
            raise ConfigError(
                f'{BLOCK}.buddies.mode: "{mode}" is gone, because a step waited less for a copy (0.4 to 3.1 % of it) '
                'than where buddies replayed it (0.9 to 14.9 %); use "copy", which works with every optimizer and on '
                "accelerators, too"
            )
        if "verify_every_steps" in given:
            raise ConfigError(
                f"{BLOCK}.buddies.verify_every_steps: this key is gone, because buddies replay no steps that would "
                "have to be compared; leave it out, each copy has digests"
            )
        return block
