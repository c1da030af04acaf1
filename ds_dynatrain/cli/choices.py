"""Options that take one of a few words. Nothing is imported here, so that --help is quick."""

from __future__ import annotations

from enum import Enum


class Format(str, Enum):
    """Format that a checkpoint is converted to."""

    SAFETENSORS = "safetensors"
    DEEPSPEED = "deepspeed-universal"
    DCP = "dcp"
    OURS = "universal"


class WeightType(str, Enum):
    """A type of torch's that all weights are converted to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Size(str, Enum):
    """A model of `ds-dynatrain compare`: the names of `comparison.job.SHAPES`."""

    TINY = "tiny"
    SMALL = "8M"
    MIDDLE = "30M"
    LARGE = "125M"


class WayName(str, Enum):
    """A way to carry a change out: the names of `comparison.job.WAYS`."""

    LIVE = "live"
    GLOO = "live-gloo"
    LATE = "late"
    LEAN = "lean"
    HERE = "here"
    RESTART = "restart"
    DEEPSPEED = "deepspeed"
    DCP = "dcp"
