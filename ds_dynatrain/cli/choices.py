"""The permitted values of some command options. No library is imported here, so that --help is quick."""

from __future__ import annotations

from enum import Enum


class Format(str, Enum):
    """The formats to which a checkpoint can be converted."""

    SAFETENSORS = "safetensors"
    DEEPSPEED = "deepspeed-universal"
    DCP = "dcp"
    OURS = "universal"


class WeightType(str, Enum):
    """The element types to which all weights can be converted."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class TransportChoice(str, Enum):
    """The transports between members of one node, as in `dynatrain.transport`."""

    AUTO = "auto"
    GLOO = "gloo"
