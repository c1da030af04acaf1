"""ZeRO stages 1 and 2: per optimizer group one flat weight buffer on every rank, and one part of it as fp32 master.

Muon's momentum is that of all of `params_in_partition[group]`, whole, in one flat tensor; a rank without such a
parameter has none. What it stages for a step (`_muon_pending_momentum`) is written before it is read: no state.

`param._hp_mapping` is not read: it is derived, and wrong under `round_robin_gradients` (see `fragments`).
"""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist

from ds_dynatrain.adapters.flat import (
    describe_groups,
    is_hollow,
    master_rows,
    refill_frozen,
    refill_master,
    weight_rows,
    whole_rows,
)
from ds_dynatrain.adapters.fragments import correct_fragments, link_moments
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.offload import describe_gradients, flat_gradients_census, refill_gradients
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.versions import flat_offsets
from ds_dynatrain.space import HOST_GRAD, WEIGHT, BufferId

_PARAMETER_ATTRIBUTES = """
    _hp_mapping _dp_group get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad load_hp_checkpoint_state
    _index_in_param_group param_idx_in_group grad_accum _zero_optimizer _hp_grad
""".split()


class FlatStages:
    """Stages 1 and 2; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, this rank's master, moments and offloaded gradients; frozen tensors alone."""
        zero = engine.optimizer
        masters = zero.single_partition_of_fp32_groups
        whole = [sum(parameter.numel() for parameter in touched) for touched in zero.params_in_partition]
        buffers, scalars = describe_groups(engine, model, zero.bit16_groups_flat, masters, whole)
        describe_gradients(zero, masters, "group", buffers)
        for kind, name in list(buffers):
            if kind == HOST_GRAD and is_hollow(model, name.index):
                buffers[kind, name] = buffers[kind, name][:0]
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights at the parameters' addresses; masters from the flat order that DeepSpeed keeps for its reduction.

        Moments of whole tensors in the order in which it reads them.
        """
        zero = engine.optimizer
        number = {id(parameter): index for index, parameter in enumerate(model.parameters)}
        rows = weight_rows(model)
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            if is_hollow(model, group):
                continue
            ordered = zip(zero.round_robin_bit16_groups[group], flat_offsets(zero, group), strict=True)
            slots = [(number[id(parameter)], offset, parameter.numel()) for parameter, offset in ordered]
            size = int(zero.partition_size[group])  # 0.18 has a float
            rank = dist.get_rank(group=zero.real_dp_process_group[group])
            rows += master_rows(master, rank * size, slots)
            rows += whole_rows(engine, model, master, zero.params_in_partition[group])
        return rows + flat_gradients_census(zero, model)

    def release(self, engine: Any, model: ModelMap) -> None:
        """Attributes off, gradients dropped."""
        forget(model)

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Flat weights, their views, the master part and its moments become the buffers.

        Fragment maps are linked anew.
        """
        zero = engine.optimizer
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            name = BufferId("group", group)
            if not is_hollow(model, group):
                zero.bit16_groups_flat[group] = buffers[WEIGHT, name]
                zero._update_model_bit16_weights(group)
                zero.parallel_partitioned_bit16_groups[group] = zero.get_data_parallel_partitions(
                    buffers[WEIGHT, name], group
                )
            refill_master(engine, model, group, master, buffers, scalars)
        refill_gradients(zero, zero.single_partition_of_fp32_groups, "group", buffers)
        refill_frozen(model, buffers)
        zero._link_all_hp_params()
        zero._hp_optimizer_states_linked = False
        zero._param_slice_mappings = zero._create_param_mapping()
        correct_fragments(zero)
        link_moments(zero)


def forget(model: ModelMap) -> None:
    """Take gradients and DeepSpeed's attributes off the parameters."""
    for parameter in model.parameters:
        parameter.grad = None
        for name in _PARAMETER_ATTRIBUTES:
            parameter.__dict__.pop(name, None)
