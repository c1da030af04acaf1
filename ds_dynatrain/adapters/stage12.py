"""ZeRO stages 1 and 2: per optimizer group one flat weight buffer on every rank, and one part of it as fp32 master.

`param._hp_mapping` is not read: it is derived, and wrong under `round_robin_gradients` (see `fragments`).
"""

from __future__ import annotations

from typing import Any

from ds_dynatrain.adapters.fragments import correct_fragments
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import common_scalars, held_moments, read_state, write_state
from ds_dynatrain.adapters.offload import describe_gradients, flat_gradients_census, refill_gradients
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.versions import flat_offsets
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, BufferId

_PARAMETER_ATTRIBUTES = """
    _hp_mapping _dp_group get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad load_hp_checkpoint_state
    _index_in_param_group param_idx_in_group grad_accum _zero_optimizer _hp_grad
""".split()


class FlatStages:
    """Stages 1 and 2; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, this rank's master and moments; frozen tensors one by one."""
        zero = engine.optimizer
        buffers: Buffers = {}
        scalars = Scalars()
        for group, (flat, master) in enumerate(
            zip(zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True)
        ):
            name = BufferId("group", group)
            buffers[WEIGHT, name] = flat.data
            buffers[MASTER, name] = master.data
            moments, steps = read_state(engine.basic_optimizer, master, group)
            for kind, moment in moments.items():
                buffers[kind, name] = moment
            for kind, value in steps.items():
                scalars.values.setdefault(kind, {}).update(dict.fromkeys(tensors_of(model, group), value))
        describe_gradients(zero, zero.single_partition_of_fp32_groups, "group", buffers)
        for number, parameter in model.frozen():
            buffers[WEIGHT, BufferId("tensor", number)] = parameter.data.view(-1)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights at the parameters' addresses; masters from the flat order that DeepSpeed keeps for its reduction."""
        zero = engine.optimizer
        number = {id(parameter): index for index, parameter in enumerate(model.parameters)}
        rows = [Found(WEIGHT, index, 0, held.numel(), held.data_ptr()) for index, held in enumerate(model.parameters)]
        rank = engine.global_rank
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            size = int(zero.partition_size[group])  # 0.18 has a float
            low, high = rank * size, (rank + 1) * size
            ordered = zip(zero.round_robin_bit16_groups[group], flat_offsets(zero, group), strict=True)
            for parameter, offset in ordered:
                start, stop = max(offset, low), min(offset + parameter.numel(), high)
                if start < stop:
                    address = master.data_ptr() + (start - low) * master.element_size()
                    rows.append(Found(MASTER, number[id(parameter)], start - offset, stop - start, address))
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
            zero.bit16_groups_flat[group] = buffers[WEIGHT, name]
            zero._update_model_bit16_weights(group)
            zero.parallel_partitioned_bit16_groups[group] = zero.get_data_parallel_partitions(
                buffers[WEIGHT, name], group
            )
            master.data = buffers[MASTER, name]
            held = held_moments(engine.basic_optimizer, group, buffers, name)
            steps = common_scalars(scalars, tensors_of(model, group), f"optimizer group {group}")
            write_state(engine.basic_optimizer, master, group, held, steps)
        refill_gradients(zero, zero.single_partition_of_fp32_groups, "group", buffers)
        for number, parameter in model.frozen():
            parameter.data = buffers[WEIGHT, BufferId("tensor", number)].view(model.tensors[number].shape)
        zero._link_all_hp_params()
        zero._hp_optimizer_states_linked = False
        zero._param_slice_mappings = zero._create_param_mapping()
        correct_fragments(zero)


def forget(model: ModelMap) -> None:
    """Take gradients and DeepSpeed's attributes off the parameters."""
    for parameter in model.parameters:
        parameter.grad = None
        for name in _PARAMETER_ATTRIBUTES:
            parameter.__dict__.pop(name, None)


def tensors_of(model: ModelMap, group: int) -> list[int]:
    """Numbers of the trainable tensors of an optimizer group."""
    return [number for number, tensor in enumerate(model.tensors) if tensor.group == group != FROZEN]
