"""Options that take one of a few words. Nothing is imported here, so that --help is quick."""

from __future__ import annotations

from enum import Enum


class Format(str, Enum):
    """Format to which a checkpoint is converted."""

    SAFETENSORS = "safetensors"
    DEEPSPEED = "deepspeed-universal"
    DCP = "dcp"
    OURS = "universal"


class WeightType(str, Enum):
    """Type to which all weights are converted."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Size(str, Enum):
    """Model of `ds-dynatrain compare`: the names in `comparison.job.SHAPES`."""

    TINY = "tiny"
    SMALL = "8M"
    MIDDLE = "30M"
    LARGE = "125M"


class WayName(str, Enum):
    """Way to carry a change out: the names in `comparison.job.WAYS`."""

    LIVE = "live"
    GLOO = "live-gloo"
    LATE = "late"
    LEAN = "lean"
    HERE = "here"
    RESTART = "restart"
    DEEPSPEED = "deepspeed"
    DCP = "dcp"
