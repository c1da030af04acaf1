"""ZeRO stage 3: every parameter is cut over the ranks, and the parts of a sub-group lie side by side in flat buffers.

The tail of the last rank's part is padding without meaning (`torch.empty` in DeepSpeed) and is never moved. In fp32 the
weight and the master of a sub-group are one tensor. `grad_partitions_flat_buffer` is state: a parameter that got no
gradient in a step is stepped with its last gradient (measured on 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload, ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.adapters.zero.offload import keeps_gradients
from ds_dynatrain.adapters.zero.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.zero.zero_stage import Stepped, ZeroStage
from ds_dynatrain.space import HOST_GRAD, MASTER, STALE_GRAD, WEIGHT, BufferId

_MODULE_ATTRIBUTES = """
    _original_parameters pre_bwd_fn post_bwd_fn applied_pre_backward_ref_cnt ds_grads_remaining ds_id
    ds_recompute_parameters _external_params ds_inflight_param_registry all_parameters external_parameters
""".split()
_PARAMETER_ATTRIBUTES = """
    is_external_param nvme_swapper all_gather all_gather_coalesced partition item reduce_gradients_at_owner
    partition_gradients aligned_size padding_size partition_numel convert_to_zero_parameters _z3_optimizer grad_accum
""".split()
_KEPT_ATTRIBUTES = """
    ds_autoep_uc_meta ds_autoep_folding_param_family ds_zero_placement_family ds_zero_partition_group_name
    ds_autotp_universal_checkpoint_meta ds_is_replaced_module
""".split()
"""Attributes with the prefix `ds_` that AutoEP and AutoTP set once, in a new layer. They are valid in every stage."""
_RELEASES = "_PartitionedParameterCoordinator__params_to_release"
_GRADIENT_PARTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class PartitionedStage(ZeroStage):
    """ZeRO stage 3: every parameter is partitioned over the ranks."""

    alone = "partition"

    def stepped(self, engine: Any, model: ModelMap) -> Iterator[Stepped]:
        zero = engine.optimizer
        for index, master in enumerate(zero.fp32_partitioned_groups_flat):
            tensors = [model.numbers[id(parameter)] for parameter in zero.fp16_groups[index]]
            weight, group = zero.fp16_partitioned_groups_flat[index], model.tensors[tensors[0]].group
            yield Stepped(BufferId("subgroup", index), group, tensors, weight, master)

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        """Make each parameter's part, and its last gradient, a view of the given buffers."""
        zero, weight, position = engine.optimizer, buffers[WEIGHT, each.name], 0
        each.weight.data = weight
        for parameter in zero.fp16_groups[each.name.index]:
            size = parameter.ds_tensor.ds_numel
            parameter.ds_tensor.data = weight.narrow(0, position, size)
            last = buffers[STALE_GRAD, each.name].narrow(0, position, size)
            getattr(zero, _GRADIENT_PARTS)[parameter.ds_id] = last
            position += size

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        buffers, scalars = super().describe(engine, model)
        masters = engine.optimizer.fp32_partitioned_groups_flat
        sizes = [master.numel() for master in masters]
        gradients = engine.optimizer.grad_partitions_flat_buffer.split(sizes)
        buffers.update({(STALE_GRAD, BufferId("subgroup", index)): last for index, last in enumerate(gradients)})
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Return where each part lies: by `ds_tensor` for weights, and by `grad_position` for masters and gradients."""
        zero = engine.optimizer
        rows = []
        parameter: Any
        for index, parameter in enumerate(model.parameters):
            part = parameter.ds_tensor.numel()
            start = dist.get_rank(group=parameter.ds_process_group) * part
            numel = max(0, min(part, parameter.ds_numel - start))
            if not numel:
                continue
            rows.append(Found(WEIGHT, index, start, numel, parameter.ds_tensor.data_ptr()))
            if index < model.trainable:
                group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
                master = zero.fp32_partitioned_groups_flat[group]
                beside = {MASTER: master, **({HOST_GRAD: master.grad} if keeps_gradients(zero) else {})}
                for kind, held in beside.items():
                    rows.append(Found(kind, index, start, numel, held.data_ptr() + offset * held.element_size()))
                last = getattr(zero, _GRADIENT_PARTS)[parameter.ds_id]
                rows.append(Found(STALE_GRAD, index, start, numel, last.data_ptr()))
        return rows

    def release(self, engine: Any, model: ModelMap) -> None:
        """Remove patched containers and attributes from the module. Parameters keep no data.

        Under torch autocast, DeepSpeed leaves a gathered parameter in the low-precision type. The parameter is given
        the model's type again.
        """
        reset_counters()
        offload = getattr(engine.optimizer, "parameter_offload", None)
        if offload is not None:  # classes made for the hooks keep it in cycles, and it refers to groups
            offload.get_param_coordinator().__dict__.clear()
            offload.__dict__.clear()
        for parameter in model.parameters:
            parameter.grad = None
            for cell in getattr(getattr(parameter, "partition", None), "__closure__", None) or ():
                if isinstance(
                    cell.cell_contents, Init
                ):  # it is in reference cycles with its methods, and refers to groups
                    cell.cell_contents.__dict__.clear()
            forget_parameter(parameter)
            parameter.data = torch.empty(0, dtype=model.dtype, device=parameter.device)
        for module in engine.module.modules():
            forget_module(module)
        restore_linear()

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        super().refill(engine, model, buffers, scalars)
        zero = engine.optimizer
        if zero.offload_param:
            _refill_host_memory(zero, buffers)
        else:
            zero.lp_param_buffer = whole(buffers, WEIGHT)
        zero.grad_partitions_flat_buffer = whole(buffers, STALE_GRAD)


def _refill_host_memory(zero: Any, buffers: Buffers) -> None:
    """Restore the host memory of `offload_param`: one block per optimizer group, of which its sub-groups are slices.

    The blocks are separate if DeepSpeed allocated them, and contiguous if a switch did.
    """
    for group, old in enumerate(zero.param_groups_fp16_flat_cpu_memory):
        first = min(index for index, owner in zero.sub_group_to_group_id.items() if owner == group)
        held = buffers[WEIGHT, BufferId("subgroup", first)]
        memory = held.as_strided((old.numel(),), (1,), held.storage_offset())
        zero.param_groups_fp16_flat_cpu_memory[group] = memory


def restore_linear() -> None:
    """Restore torch's own `linear`.

    Stage 3 replaces `linear` for the whole process, and the backward pass of the replacement yields gradients in
    another order. If only some ranks had the replacement, stage 2 would add up gradients of different parameters.
    """
    if hasattr(InsertPostInitMethodToModuleSubClasses, "linear_bk"):
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk


def whole(buffers: Buffers, kind: str) -> torch.Tensor:
    """Return the buffer of which all sub-group buffers of a state kind are consecutive slices."""
    first = buffers[kind, BufferId("subgroup", 0)]
    size = sum(held.numel() for (name, place), held in buffers.items() if name == kind and place.place == "subgroup")
    return first.as_strided((size,), (1,), first.storage_offset())


def forget_traces() -> None:
    """Empty the stack and the cache in which DeepSpeed keeps every engine's coordinators and modules indefinitely.

    Both exist once per process, and are filled again in the next step (measured on 0.19.8: a module outlived its
    engine).
    """
    FWD_MODULE_STACK.clear()
    method = getattr(PartitionedParameterCoordinator, _RELEASES)
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    if hasattr(method, "cache_clear"):
        method.cache_clear()


def reset_counters() -> None:
    """Reset ZeRO-3's class-wide counters, so that ids agree between members with different histories."""
    forget_traces()
    Init.param_id = 0
    Init.num_persisted_parameters = Init.num_persisted_elements = 0
    Init.apply_param_persistence = False
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


def forget_module(module: nn.Module) -> None:
    """Remove what stage 3 has set on one module, including its replacement of the module's parameter table."""
    if isinstance(module._parameters, ZeROOrderedDict):
        module._parameters = dict(module._parameters.items())
    for name in _MODULE_ATTRIBUTES:
        module.__dict__.pop(name, None)


def forget_parameter(parameter: nn.Parameter) -> None:
    for name in list(parameter.__dict__):
        if (name.startswith("ds_") and name not in _KEPT_ATTRIBUTES) or name in _PARAMETER_ATTRIBUTES:
            delattr(parameter, name)
