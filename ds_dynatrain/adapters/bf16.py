"""BF16_Optimizer: what DeepSpeed takes at stage 1 for bf16 weights whose gradients are accumulated in fp32.

It is laid out as ZeRO stages 1 and 2 are (`stage12`), without their options of order and alignment. On every rank it
also keeps whole fp32 gradients, which are zero between two steps: they are built anew, and no state.
"""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist

from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import common_scalars, held_moments, read_state, write_state
from ds_dynatrain.adapters.stage12 import forget, tensors_of
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import MASTER, WEIGHT, BufferId


class AccumulatingStage:
    """BF16_Optimizer; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, this rank's master and moments; frozen tensors one by one."""
        held = engine.optimizer
        buffers: Buffers = {}
        scalars = Scalars()
        for group, (flat, master) in enumerate(
            zip(held.bf16_groups_flat, held.fp32_groups_flat_partition, strict=True)
        ):
            name = BufferId("group", group)
            buffers[WEIGHT, name], buffers[MASTER, name] = flat.data, master.data
            moments, steps = read_state(engine.basic_optimizer, master, group)
            buffers.update({(kind, name): moment for kind, moment in moments.items()})
            for kind, value in steps.items():
                scalars.values.setdefault(kind, {}).update(dict.fromkeys(tensors_of(model, group), value))
        for number, parameter in model.frozen():
            buffers[WEIGHT, BufferId("tensor", number)] = parameter.data.view(-1)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights at the parameters' addresses; masters by the order and the sizes of `bf16_groups`."""
        held = engine.optimizer
        number = {id(parameter): index for index, parameter in enumerate(model.parameters)}
        rows = [Found(WEIGHT, index, 0, each.numel(), each.data_ptr()) for index, each in enumerate(model.parameters)]
        for group, master in enumerate(held.fp32_groups_flat_partition):
            low = dist.get_rank(group=held.real_dp_process_group[group]) * master.numel()
            position = 0
            for parameter in held.bf16_groups[group]:
                start, stop = max(position, low), min(position + parameter.numel(), low + master.numel())
                if start < stop:
                    address = master.data_ptr() + (start - low) * master.element_size()
                    rows.append(Found(MASTER, number[id(parameter)], start - position, stop - start, address))
                position += parameter.numel()
        return rows

    def release(self, engine: Any, model: ModelMap) -> None:
        """Attributes off, gradients dropped."""
        forget(model)

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Flat weights, their views and parts, the master part and its moments become the buffers."""
        held = engine.optimizer
        for group, master in enumerate(held.fp32_groups_flat_partition):
            name = BufferId("group", group)
            flat, size = buffers[WEIGHT, name], master.numel()
            held.bf16_groups_flat[group] = flat
            held._update_storage_to_flattened_tensor(held.bf16_groups[group], flat)
            held.bf16_partitioned_groups[group] = list(flat.split(size))
            master.data = buffers[MASTER, name]
            moments = held_moments(engine.basic_optimizer, group, buffers, name)
            steps = common_scalars(scalars, tensors_of(model, group), f"optimizer group {group}")
            write_state(engine.basic_optimizer, master, group, moments, steps)
        for number, parameter in model.frozen():
            parameter.data = buffers[WEIGHT, BufferId("tensor", number)].view(model.tensors[number].shape)
        held._link_all_hp_params()
        held._hp_optimizer_states_linked = False
        held._param_slice_mappings = held._create_param_mapping()
