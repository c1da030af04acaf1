"""ZeRO stage 0 in low precision with DeepSpeed's FusedAdam: `FP16_Optimizer`.

Per optimizer group one flat weight buffer and one flat fp32 master, whole on every rank, without padding; frozen
tensors stand alone. The optimizer steps the flat master, so a group has one step count.
"""

from __future__ import annotations

from typing import Any

from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import common_scalars, held_moments, read_state, write_state
from ds_dynatrain.adapters.stage12 import tensors_of
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import MASTER, WEIGHT, BufferId


class FusedStage:
    """Stage 0 over flat groups; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, the flat master and its moments; frozen tensors one by one."""
        buffers: Buffers = {}
        scalars = Scalars()
        flats = zip(engine.optimizer.fp16_groups_flat, engine.optimizer.fp32_groups_flat, strict=True)
        for group, (flat, master) in enumerate(flats):
            name = BufferId("group", group)
            buffers[WEIGHT, name] = flat.data
            buffers[MASTER, name] = master.data
            moments, steps = read_state(engine.basic_optimizer, master, group)
            for kind, moment in moments.items():
                buffers[kind, name] = moment
            for kind, value in steps.items():
                scalars.values.setdefault(kind, {}).update(dict.fromkeys(tensors_of(model, group), value))
        for number, parameter in model.frozen():
            buffers[WEIGHT, BufferId("tensor", number)] = parameter.data.view(-1)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights at the parameters' addresses; masters in the order of `fp16_groups`, end to end."""
        number = {id(parameter): index for index, parameter in enumerate(model.parameters)}
        rows = [Found(WEIGHT, index, 0, held.numel(), held.data_ptr()) for index, held in enumerate(model.parameters)]
        for parameters, master in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups_flat, strict=True):
            address = master.data_ptr()
            for parameter in parameters:
                rows.append(Found(MASTER, number[id(parameter)], 0, parameter.numel(), address))
                address += parameter.numel() * master.element_size()
        return rows

    def release(self, engine: Any, model: ModelMap) -> None:
        """Drop the gradients; nothing else hangs on the module."""
        for parameter in model.parameters:
            parameter.grad = None

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Flat weights, the parameters' views of them, masters and moments become the buffers."""
        fused = engine.optimizer
        for group, master in enumerate(fused.fp32_groups_flat):
            name, at = BufferId("group", group), 0
            fused.fp16_groups_flat[group] = flat = buffers[WEIGHT, name]
            for parameter in fused.fp16_groups[group]:
                parameter.data = flat.narrow(0, at, parameter.numel()).view(parameter.shape)
                at += parameter.numel()
            master.data = buffers[MASTER, name]
            held = held_moments(engine.basic_optimizer, group, buffers, name)
            steps = common_scalars(scalars, tensors_of(model, group), f"optimizer group {group}")
            write_state(engine.basic_optimizer, master, group, held, steps)
        for number, parameter in model.frozen():
            parameter.data = buffers[WEIGHT, BufferId("tensor", number)].view(model.tensors[number].shape)
