"""Which adapter speaks for a DeepSpeed optimizer: by its class, not by the number of the ZeRO stage."""

from __future__ import annotations

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_dynatrain.adapters.bf16 import AccumulatingStage
from ds_dynatrain.adapters.stage0 import ReplicatedStage
from ds_dynatrain.adapters.stage0_fused import FusedStage
from ds_dynatrain.adapters.stage3 import PartitionedStage
from ds_dynatrain.adapters.stage12 import FlatStages
from ds_dynatrain.adapters.state import StageAdapter
from ds_dynatrain.errors import UnsupportedError

ADAPTERS: tuple[tuple[type, StageAdapter], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, PartitionedStage()),
    (DeepSpeedZeroOptimizer, FlatStages()),
    (BF16_Optimizer, AccumulatingStage()),
    (FP16_Optimizer, FusedStage()),
    (FP16_UnfusedOptimizer, ReplicatedStage()),
    (torch.optim.Optimizer, ReplicatedStage()),
)
"""The first class that an optimizer is an instance of counts."""


def adapter_of(optimizer: object) -> StageAdapter:
    """The adapter of an engine's present optimizer; UnsupportedError, naming the class, if there is none."""
    for kind, adapter in ADAPTERS:
        if isinstance(optimizer, kind):
            return adapter
    raise UnsupportedError(
        f"DeepSpeed wrapped the optimizer into a {type(optimizer).__name__}, whose state cannot be moved; leave the "
        "key of the configuration out that asks for it, or leave out the dynatrain block"
    )
