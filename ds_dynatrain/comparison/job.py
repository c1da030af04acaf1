"""Definition of a comparison: models by size, changes of layout, and the ways (methods) to carry out a change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_dynatrain.errors import ConfigError

BATCH, LENGTH = 12, 16
"""Number of samples in a global batch, for any number of ranks, and length of a sample in bytes of text."""
SHAPES: Mapping[str, tuple[int, int, int]] = {
    "tiny": (2, 64, 2),
    "8M": (6, 336, 6),
    "30M": (9, 512, 8),
    "125M": (10, 1024, 16),
}
"""The models: a map from name to number of layers, width and number of attention heads."""


@dataclass(frozen=True)
class ComparedLayout:
    """A layout with data parallelism only, which every framework in the comparison supports."""

    data: int
    zero_stage: int

    def __str__(self) -> str:
        return f"{self.data} ranks, stage {self.zero_stage}"


@dataclass(frozen=True)
class ComparedChange:
    """A change from one layout to another."""

    source: ComparedLayout
    target: ComparedLayout

    def __str__(self) -> str:
        return f"{self.source} → {self.target}"

    @staticmethod
    def parse(text: str) -> ComparedChange:
        """Parse text such as "data=4,zero_stage=1:data=3,zero_stage=2".

        Raises ConfigError if it is not a valid change.
        """
        try:
            sides = []
            for part in text.split(":"):
                sizes = dict(size.split("=") for size in part.split(","))
                sides.append(ComparedLayout(**{name: int(size) for name, size in sizes.items()}))
            change = ComparedChange(*sides)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{text!r} is no change; write data=4,zero_stage=1:data=3,zero_stage=2") from error
        for side in sides:
            if side.data < 1 or BATCH % side.data or not 0 <= side.zero_stage <= 3:
                raise ConfigError(
                    f"{text!r} cannot be run: give data sizes that divide the batch of {BATCH}, and a zero_stage from "
                    "0 to 3"
                )
        return change


@dataclass(frozen=True)
class Way:
    """A way (method) to carry out a change.

    name: a short name for options and files.
    title: the name that tables and charts show.
    program: the module that the ranks run, and that converts.
    is_restarted: whether the old processes end and new ones start.
    is_live: whether the way is a switch of this package that does not use the disk.
    converts: whether DeepSpeed's converter runs between the two jobs.
    block: entries to add to the `dynatrain` block.
    """

    name: str
    title: str
    program: str = "ours"
    is_restarted: bool = False
    is_live: bool = False
    converts: bool = False
    block: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """Whether masters and moments are moved after the pause, during the first step."""
        return "late" in self.block


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way("live", "live, by memory", is_live=True),
        Way("live-gloo", "live, over gloo", is_live=True, block={"transport": "gloo"}),
        Way("late", "live, masters and moments late", is_live=True, block={"late": True}),
        Way("lean", "lean switch, through a checkpoint", block={"safety": "lean"}),
        Way("here", "checkpoint, same processes"),
        Way("restart", "checkpoint, restart", is_restarted=True),
        Way("deepspeed", "DeepSpeed universal, restart", "stock", is_restarted=True, converts=True),
        Way("dcp", "FSDP2 and torch DCP, restart", "dcp", is_restarted=True),
    )
}
"""The ways to carry out a change, keyed by name, in the order in which they are shown."""
SAVED, UNIVERSAL = "saved", "universal"
"""Subfolders of a task's folder for DeepSpeed's own checkpoint and for its universal form."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments in torch and DeepSpeed."""
YARD = "deepspeed"
"""The reference with which live switches are compared: DeepSpeed's universal checkpoint and a restart."""
BEFORE, AFTER, LEAD = 8, 6, 2
"""Number of steps before the change, number of steps after it, and number of steps by which a request precedes it."""


@dataclass(frozen=True)
class Task:
    """The work of one launch of ranks.

    part: "whole" if the same processes run before and after the change, otherwise "old", "convert" or "new".
    folder: the folder for checkpoints.
    """

    way: Way
    part: str
    size: str
    change: ComparedChange
    folder: str

    @property
    def processes(self) -> int:
        """Number of ranks in the launch."""
        source, target = self.change.source.data, self.change.target.data
        return {"old": source, "convert": 1, "new": target}.get(self.part, max(source, target))
