"""ZeRO stage 0 in low precision with DeepSpeed's FusedAdam: `FP16_Optimizer`.

Per optimizer group one flat weight buffer and one flat fp32 master, whole on every rank, without padding; frozen
tensors stand alone. The optimizer steps the flat master, so a group has one step count.
"""

from __future__ import annotations

from typing import Any

from ds_dynatrain.adapters.flat import (
    describe_groups,
    end_to_end,
    master_rows,
    refill_frozen,
    refill_master,
    weight_rows,
)
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import WEIGHT, BufferId


class FusedStage:
    """Stage 0 over flat groups; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, the flat master and its moments; frozen tensors one by one."""
        fused = engine.optimizer
        return describe_groups(engine, model, fused.fp16_groups_flat, fused.fp32_groups_flat)

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights at the parameters' addresses; masters in the order of `fp16_groups`, end to end."""
        rows = weight_rows(model)
        for parameters, master in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups_flat, strict=True):
            rows += master_rows(master, 0, end_to_end(model, parameters))
        return rows

    def release(self, engine: Any, model: ModelMap) -> None:
        """Drop the gradients; nothing else hangs on the module."""
        for parameter in model.parameters:
            parameter.grad = None

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Flat weights, the parameters' views of them, masters and moments become the buffers."""
        fused = engine.optimizer
        for group, master in enumerate(fused.fp32_groups_flat):
            fused.fp16_groups_flat[group] = flat = buffers[WEIGHT, BufferId("group", group)]
            for number, at, numel in end_to_end(model, fused.fp16_groups[group]):
                model.parameters[number].data = flat.narrow(0, at, numel).view(model.tensors[number].shape)
            refill_master(engine, model, group, master, buffers, scalars)
        refill_frozen(model, buffers)
