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
