"""Features of a user's model that decide which layouts DeepSpeed can train it in; see `support/axes.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.moe.layer import MoE
from torch import nn

from ds_dynatrain.adapters import experts
from ds_dynatrain.adapters.pipeline import is_pipeline
from ds_dynatrain.adapters.sequence import spread_layers
from ds_dynatrain.support.axes import EXPERTS, NATIVE_EXPERTS, PIPELINE, ULYSSES, Features


def features_of(model: nn.Module, config: Mapping[str, Any], mpu: Any) -> Features:
    """Return the features of a model that DeepSpeed has not altered yet."""
    found = {
        PIPELINE: is_pipeline(model),
        EXPERTS: experts.is_on(config),
        NATIVE_EXPERTS: any(isinstance(part, MoE) for part in model.modules()),
        ULYSSES: mpu is not None or any(True for _ in spread_layers(model)),
    }
    return frozenset(feature for feature, is_there in found.items() if is_there)
