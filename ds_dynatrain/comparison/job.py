"""The subject of a comparison: models by size, changes, and the ways to carry one out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.records import from_record, to_record

BATCH, LENGTH = 12, 16
"""Samples of a global batch, in any world, and the length of a sample in bytes of text."""
SHAPES: Mapping[str, tuple[int, int, int]] = {
    "tiny": (2, 64, 2),
    "8M": (6, 336, 6),
    "30M": (9, 512, 8),
    "125M": (10, 1024, 16),
}
"""(layers, width, heads) of each model by name."""


@dataclass(frozen=True)
class Side:
    """A layout of data parallelism alone, which every way can have."""

    data: int
    zero_stage: int

    def __str__(self) -> str:
        return f"{self.data} ranks, stage {self.zero_stage}"


@dataclass(frozen=True)
class Change:
    """A change from one layout to another."""

    source: Side
    target: Side

    def __str__(self) -> str:
        return f"{self.source} → {self.target}"

    @property
    def processes(self) -> int:
        """Number of processes in a launch that lives through the change."""
        return max(self.source.data, self.target.data)

    @staticmethod
    def parse(text: str) -> Change:
        """Read "data=4,zero_stage=1:data=3,zero_stage=2"; ConfigError for anything else."""
        try:
            sides = []
            for part in text.split(":"):
                sizes = dict(size.split("=") for size in part.split(","))
                sides.append(Side(**{name: int(size) for name, size in sizes.items()}))
            change = Change(*sides)
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
    """A way to carry out a change. name: short, for options and files. title: for readers.

    program: the program that `worker` runs. is_restarted: whether the old processes end and new ones begin. converts:
    whether DeepSpeed's converter runs in between. transport, safety, late: as in the `dynatrain` block.
    """

    name: str
    title: str
    program: str
    is_restarted: bool = False
    converts: bool = False
    transport: str = "auto"
    safety: str = "rollback"
    late: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it is one of our switches that needs no disk."""
        return self.program == "live" and self.safety == "rollback"


WAYS: tuple[Way, ...] = (
    Way("live", "live, by memory", "live"),
    Way("live-gloo", "live, over gloo", "live", transport="gloo"),
    Way("late", "live, masters and moments late", "live", late=True),
    Way("lean", "lean switch, through a checkpoint", "live", safety="lean"),
    Way("here", "checkpoint, same processes", "here"),
    Way("restart", "checkpoint, restart", "ours", is_restarted=True),
    Way("deepspeed", "DeepSpeed universal, restart", "stock", is_restarted=True, converts=True),
    Way("dcp", "FSDP2 and torch DCP, restart", "dcp", is_restarted=True),
)
SAVED, UNIVERSAL = "saved", "universal"
"""Folders of the two forms of DeepSpeed's checkpoint, inside the folder of a task."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state in torch and DeepSpeed."""
YARD = "deepspeed"
"""The way with which the live ones are compared."""


@dataclass(frozen=True)
class Task:
    """The work of one launch of ranks.

    part: "whole" for processes that live through the change, else "old" or "new". folder: for checkpoints. before,
    after: number of steps before and after the change. lead: steps before the change at which it is requested, where a
    way can do that.
    """

    program: str
    part: str
    size: str
    change: Change
    folder: str
    transport: str = "auto"
    safety: str = "rollback"
    late: bool = False
    before: int = 8
    after: int = 6
    lead: int = 2

    def to_json(self) -> str:
        """Return the task as an argument of a rank's command line."""
        return json.dumps(to_record(self))

    @staticmethod
    def from_json(text: str) -> Task:
        """Read a task that `to_json` wrote."""
        return from_record(Task, json.loads(text))
