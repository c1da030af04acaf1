"""The `clocks` block of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_dynatrain.config import Block


class ClocksConfig(Block):
    """Lower clocks for members that wait, by the times that `balance` measures."""

    actuator: Annotated[str, Field(pattern=r"^(off|dry|zeus|[\w.]+:\w+)$")] = "off"
    """What sets clocks: "off": nothing; "dry": the log says what would be set; "zeus": that library; or an actuator of
    your own, "module:Class"."""
