"""Choice of the `Stage` for a DeepSpeed optimizer, by its class and not by its number; and the stages over flat groups.

| class | its groups |
|---|---|
| `FP16_Optimizer` (stage 0, low precision with FusedAdam) | whole on every rank, without padding |
| `DeepSpeedZeroOptimizer` (stages 1 and 2) | weights whole, one part as fp32 master |
| `BF16_Optimizer` (stage 1 for bf16 weights whose gradients are accumulated in fp32) | the same, in plain order |

Muon's momentum is one flat tensor with that of all of `params_in_partition[group]`, whole; a rank without such a
parameter has none. Its staging for a step (`_muon_pending_momentum`) is written before it is read, so it is no state.
Nor are the whole fp32 gradients of BF16_Optimizer, which are zero between two steps.

`param._hp_mapping` is not read: it is derived. DeepSpeed 0.19.8 links a parameter to its fragment of the flat master by
the order of registration, and by true offsets only where something is padded between tensors. Under
`round_robin_gradients` alone the flat order is another one, and `safe_get_full_fp32_param`, its setters and the
universal checkpoint then read and write the elements of other parameters. `correct_fragments` sets that right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import link_hp_params

from ds_dynatrain.adapters.device import compute_device
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.offload import keeps_gradients
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.stage import FlatGroups, Slots, Stage, Stepped, end_to_end, is_empty_group, numbers_of
from ds_dynatrain.adapters.stage0 import ReplicatedStage
from ds_dynatrain.adapters.stage3 import PartitionedStage
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.versions import flat_offsets
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import HOST_GRAD, WEIGHT


class FusedStage(FlatGroups):
    """Stage of `FP16_Optimizer`: both flat groups are whole on every rank."""

    flats, masters = "fp16_groups_flat", "fp32_groups_flat"

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        return 0, end_to_end(model, held.fp16_groups[group])

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        held, flat = engine.optimizer, buffers[WEIGHT, each.name]
        held.fp16_groups_flat[each.group] = flat
        for number, at, numel in end_to_end(model, held.fp16_groups[each.group]):
            model.parameters[number].data = flat.narrow(0, at, numel).view(model.tensors[number].shape)


class FlatStages(FlatGroups):
    """Stage of ZeRO stages 1 and 2: whole flat weights, one part of the fp32 master."""

    flats, masters = "bit16_groups_flat", "single_partition_of_fp32_groups"

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """Read the slots off the flat order that DeepSpeed keeps for its reduction."""
        number = numbers_of(model)
        ordered = zip(held.round_robin_bit16_groups[group], flat_offsets(held, group), strict=True)
        size = int(held.partition_size[group])  # 0.18 has a float
        low = dist.get_rank(group=held.real_dp_process_group[group]) * size
        return low, [(number[id(parameter)], offset, parameter.numel()) for parameter, offset in ordered]

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        held, group, flat = engine.optimizer, each.group, buffers[WEIGHT, each.name]
        held.bit16_groups_flat[group] = flat
        held._update_model_bit16_weights(group)
        held.parallel_partitioned_bit16_groups[group] = held.get_data_parallel_partitions(flat, group)

    def whole(self, held: Any, group: int) -> Iterable[torch.Tensor]:
        """Return all parameters of which the rank has a part."""
        parameters: Iterable[torch.Tensor] = held.params_in_partition[group]
        return parameters

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Return the rows of `FlatGroups`, and offloaded gradients where the reduction copies them
        (`grad_position`).
        """
        rows, held, number = super().census(engine, model), engine.optimizer, numbers_of(model)
        for group, parameters in enumerate(held.params_in_partition if keeps_gradients(held) else ()):
            gradient = held.single_partition_of_fp32_groups[group].grad
            for parameter in (parameter for parameter in parameters if id(parameter) in number):
                _, start, offset, numel = held.grad_position[held.get_param_id(parameter)]
                address = gradient.data_ptr() + offset * gradient.element_size()
                rows.append(Found(HOST_GRAD, number[id(parameter)], start, numel, address))
        return rows

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        super().refill(engine, model, buffers, scalars)
        _relink(engine.optimizer)


class AccumulatingStage(FlatGroups):
    """Stage of `BF16_Optimizer`: whole flat weights, one part of the fp32 master."""

    flats, masters = "bf16_groups_flat", "fp32_groups_flat_partition"

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        rank = dist.get_rank(group=held.real_dp_process_group[group])
        return rank * held.fp32_groups_flat_partition[group].numel(), end_to_end(model, held.bf16_groups[group])

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        held, group, flat = engine.optimizer, each.group, buffers[WEIGHT, each.name]
        held.bf16_groups_flat[group] = flat
        held._update_storage_to_flattened_tensor(held.bf16_groups[group], flat)
        held.bf16_partitioned_groups[group] = list(flat.split(each.master.numel()))

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        super().refill(engine, model, buffers, scalars)
        _relink(engine.optimizer)


STAGES: tuple[tuple[type, Stage], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, PartitionedStage()),
    (DeepSpeedZeroOptimizer, FlatStages()),
    (BF16_Optimizer, AccumulatingStage()),
    (FP16_Optimizer, FusedStage()),
    (FP16_UnfusedOptimizer, ReplicatedStage()),
    (torch.optim.Optimizer, ReplicatedStage()),
)
"""Stages by optimizer class; the first class that an optimizer is an instance of counts."""


def stage_of(optimizer: object) -> Stage:
    """Return the stage of an engine's present optimizer; UnsupportedError, naming the class, if there is none."""
    for kind, stage in STAGES:
        if isinstance(optimizer, kind):
            return stage
    raise UnsupportedError(
        f"DeepSpeed wrapped the optimizer into a {type(optimizer).__name__}, whose state cannot be moved; leave the "
        "key of the configuration out that asks for it, or leave out the dynatrain block"
    )


# ---- fragments ---------------------------------------------------------------------------------------------------


def _relink(held: Any) -> None:
    """Link the parameters of a refilled optimizer to their parts of it, and those parts to its moments.

    `safe_get_full_optimizer_state` then finds the moments before the first step, in which DeepSpeed links them. Does
    nothing for a group without moments.
    """
    held._link_all_hp_params()
    held._hp_optimizer_states_linked = False
    held._param_slice_mappings = held._create_param_mapping()
    correct_fragments(held)
    if all(held.optimizer.state.get(group["params"][0]) for group in held.optimizer.param_groups):
        held._lazy_init_hp_params_optimizer_state()


def correct_fragments(zero: Any) -> None:
    """Link the parameters of a ZeRO optimizer of stage 1 or 2 by their true offsets; do nothing for any other."""
    if not getattr(zero, "round_robin_gradients", False):
        return
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        held = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
        offset = {id(parameter): at for parameter, at in zip(*held, strict=True)}
        size, peers = zero.partition_size[group], zero.real_dp_process_group[group]
        link_hp_params(
            lp_param_list=zero.bit16_groups[group],
            flat_hp_partition=master,
            gradient_dict=zero.averaged_gradients,
            offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload,
            param_group_index=group,
            partition_start=dist.get_rank(group=peers) * size,
            partition_size=size,
            dp_group=peers,
            param_offsets=[offset[id(parameter)] for parameter in zero.bit16_groups[group]],
        )
    zero._hp_optimizer_states_linked = False
    zero._param_slice_mappings = zero._create_param_mapping()
    if zero.cpu_offload:
        zero._create_optimizer_mapping()


# ---- BF16_Optimizer in pipelines ---------------------------------------------------------------------------------


def count_empty_experts(optimizer: Any, model: ModelMap) -> None:
    """Let a pipeline stage without experts add 0 to their norm. Called before a step.

    DeepSpeed adds this norm up over stages in a collective, which a stage would leave out if no expert had a gradient
    there.
    """
    for group, has_gradient in enumerate(optimizer.fp32_groups_has_gradients):
        if is_empty_group(model, group) and optimizer.param_groups[group].get("moe"):
            has_gradient[-1] = True


@contextmanager
def stage_without_gradients(optimizer: Any) -> Iterator[None]:
    """Make a pipeline stage that counts no gradient add 0 to the norm inside the block; DeepSpeed stacks an
    empty list.
    """
    own = optimizer.get_grads_for_norm

    def at_least_one(for_clipping: bool = False) -> Any:
        found = own(for_clipping)
        if for_clipping or found[0]:
            return found
        return [torch.zeros(1, device=compute_device())], found[1]

    with replaced(optimizer, "get_grads_for_norm", at_least_one):
        yield
