"""The `balance` block of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ds_dynatrain.config import BLOCK, Block, File, Said, Size, Steps
from ds_dynatrain.errors import ConfigError


class BalanceConfig(Block):
    """The settings for timing layers and members, and for proposing faster layouts or switching to them."""

    mode: Literal["act", "advise", "off"] = "advise"
    """"advise": layers are timed, and nothing moves by itself; "act": layers also move; "off": nothing is timed."""
    profile: File | None = None
    """A profile of `engine.balancer.profile.save`, used until one is measured, and by `pipeline.partition`
    "profile"."""
    every_steps: Steps = 50
    """Steps from the beginning of one timing window to the beginning of the next."""
    window_steps: Steps = 1
    """Steps timed in a window; at most `every_steps`."""
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of a step below which no move pays, and below which costs count as equal."""
    safety: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """A move is made once the time lost without it reaches this many times its cost; 2: there and back."""
    shape: Literal["boundaries", "any"] = "boundaries"
    """Allowed changes. "boundaries": of stages; "any": also numbers of stages and data ranks, and samples of each
    rank."""
    members: Literal["keep", "idle", "release"] = "keep"
    """What happens if fewer members are enough. "keep": all keep working; "idle": the others wait; "release": nodes of
    idle members leave, down to MIN."""
    at_most_slower: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share by which a step with fewer members may be slower than the fastest with all of them; only with `members`
    "idle" or "release"."""
    experts: bool = False
    """Whether tokens of experts are counted, and experts of AutoEP's layers swap between ranks where that pays."""
    slow_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 1.25
    """A member counts as slow if it takes this many times as long as the median member of its stage; `None`: no member
    does."""
    slow_steps: Annotated[int, Field(ge=3), Said("optimizer steps")] = 20
    """Steps within which a slow member is found: by two timing windows, one in every third of these steps."""
    memory_limit_bytes: Annotated[Size, Said("bytes")] | None = None
    """Predicted bytes that a member may hold; `None`: no limit, and in `"layouts": "best"` the memory of its device, or
    its part of the host's."""

    @property
    def measures(self) -> bool:
        """Whether layers are timed."""
        return self.mode != "off"

    @property
    def slow_seen_steps(self) -> int:
        """Steps from the first window in which a member is slow to the window from which on it counts as slow."""
        return self.slow_steps // 3

    @property
    def acts(self) -> bool:
        """Whether the balancer switches to faster layouts by itself."""
        return self.mode == "act"

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        """Raise ConfigError if a window is longer than the interval between windows."""
        if self.window_steps > self.every_steps:
            raise ConfigError(
                f"{BLOCK}.balance.window_steps: {self.window_steps} steps are to be timed of every "
                f"{self.every_steps}; give at most every_steps"
            )
        return self
