"""BF16_Optimizer: what DeepSpeed takes at stage 1 for bf16 weights whose gradients are accumulated in fp32.

It is laid out as ZeRO stages 1 and 2 are (`stage12`), without their options of order and alignment. On every rank it
also keeps whole fp32 gradients, which are zero between two steps: they are built anew, and no state.
"""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist

from ds_dynatrain.adapters.flat import (
    describe_groups,
    end_to_end,
    is_hollow,
    master_rows,
    refill_frozen,
    refill_master,
    weight_rows,
)
from ds_dynatrain.adapters.fragments import link_moments
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.stage12 import forget
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import WEIGHT, BufferId


def count_hollow_experts(optimizer: Any, model: ModelMap) -> None:
    """Before a step, let a pipeline stage without experts add 0 to their norm.

    DeepSpeed adds it up over stages in a collective that it leaves out where no expert has a gradient.
    """
    for group, has_gradient in enumerate(optimizer.fp32_groups_has_gradients):
        if is_hollow(model, group) and optimizer.param_groups[group].get("moe"):
            has_gradient[-1] = True


class AccumulatingStage:
    """BF16_Optimizer; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, this rank's master and moments; frozen tensors one by one."""
        held = engine.optimizer
        return describe_groups(engine, model, held.bf16_groups_flat, held.fp32_groups_flat_partition)

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights at the parameters' addresses; masters by the order and the sizes of `bf16_groups`."""
        held = engine.optimizer
        rows = weight_rows(model)
        for group, master in enumerate(held.fp32_groups_flat_partition):
            if is_hollow(model, group):
                continue
            rank = dist.get_rank(group=held.real_dp_process_group[group])
            rows += master_rows(master, rank * master.numel(), end_to_end(model, held.bf16_groups[group]))
        return rows

    def release(self, engine: Any, model: ModelMap) -> None:
        """Attributes off, gradients dropped."""
        forget(model)

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Flat weights, their views and parts, the master part and its moments become the buffers."""
        held = engine.optimizer
        for group, master in enumerate(held.fp32_groups_flat_partition):
            refill_master(engine, model, group, master, buffers, scalars)
            if is_hollow(model, group):
                continue
            flat = buffers[WEIGHT, BufferId("group", group)]
            held.bf16_groups_flat[group] = flat
            held._update_storage_to_flattened_tensor(held.bf16_groups[group], flat)
            held.bf16_partitioned_groups[group] = list(flat.split(master.numel()))
        refill_frozen(model, buffers)
        held._link_all_hp_params()
        held._hp_optimizer_states_linked = False
        held._param_slice_mappings = held._create_param_mapping()
        link_moments(held)
