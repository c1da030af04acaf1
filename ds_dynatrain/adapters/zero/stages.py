"""The classes of `ZeroStage`. The one for a DeepSpeed optimizer is chosen by the optimizer's class, not by its stage
number.

| class | its groups |
|---|---|
| a torch optimizer (stage 0, fp32) | none: it steps the parameters themselves; weight and master are the same memory |
| `FP16_UnfusedOptimizer` (stage 0, low precision) | none: one fp32 clone of each parameter |
| `FP16_Optimizer` (stage 0, low precision with FusedAdam) | whole on every rank, without padding |
| `DeepSpeedZeroOptimizer` (stages 1 and 2) | whole weights, and one part as fp32 master |
| `BF16_Optimizer` (stage 1 for bf16 weights whose gradients are accumulated in fp32) | the same, in plain order |

Muon's momentum is one flat tensor, kept whole for all of `params_in_partition[group]`. A rank without such a parameter
has none. Its staging for a step (`_muon_pending_momentum`) is written before it is read, so it is not state. Neither
are the whole fp32 gradients of BF16_Optimizer, which are zero between two steps.

`param._hp_mapping` is not read, because it is derived. DeepSpeed 0.19.8 links a parameter to its fragment of the flat
master by the order of registration; it uses true offsets only if there is padding between tensors. With only
`round_robin_gradients`, the flat order differs from the order of registration, so `safe_get_full_fp32_param`, its
setters and the universal checkpoint read and write the elements of other parameters. `link_fragments` corrects the
links.

At stage 3 every parameter is cut over the ranks, and the parts of a sub-group lie side by side in flat buffers. The
tail of the last rank's part is padding without meaning (`torch.empty` in DeepSpeed) and is never moved. In fp32 the
weight and the master of a sub-group are one tensor. `grad_partitions_flat_buffer` is state: a parameter that got no
gradient in a step is stepped with its last gradient (measured on 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import deepspeed.comm as dist
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload, ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.adapters.versions.deepspeed_versions import flat_offsets
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.adapters.zero.optimizers import rule_of
from ds_dynatrain.adapters.zero.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.zero.zero_stage import (
    Slots,
    Stepped,
    ZeroStage,
    end_to_end,
    fill_absent,
    is_empty_group,
    keeps_gradients,
    level_counts,
    rows_of,
)
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import FROZEN, HOST_GRAD, MASTER, STALE_GRAD, WEIGHT, BufferId
from ds_dynatrain.space.zero import places_of

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


class ReplicatedStage(ZeroStage):
    """ZeRO stage 0: every rank holds every tensor whole.

    On a pipeline stage without a tensor of an optimizer group, a placeholder element (see `fill_empty_groups`) counts
    the steps of that group.
    """

    def _masters(self) -> list[torch.Tensor]:
        """Return the tensors that the basic optimizer steps at stage 0, in the order of registration.

        FP16_UnfusedOptimizer has no master for a parameter without elements, such as an expert of another rank.
        """
        parameters = self.model.parameters[: self.model.trainable]
        if not isinstance(self.zero, FP16_UnfusedOptimizer):
            return list(parameters)
        held = iter([master for group in self.zero.fp32_groups for master in group])
        return [next(held) if each.numel() else torch.empty_like(each, dtype=torch.float32) for each in parameters]

    def stepped(self) -> Iterator[Stepped]:
        for number, master in enumerate(self._masters()):
            group = self.model.tensors[number].group
            yield Stepped(BufferId("tensor", number), group, [number], self.model.parameters[number], master)
        for group, holder in _holders_of_empty_groups(self.basic, self.model).items():
            tensors = [number for number, tensor in enumerate(self.model.tensors) if tensor.group == group]
            yield Stepped(BufferId("tensor", tensors[0]), group, tensors, holder, holder, is_empty=True)

    def put_weight(self, each: Stepped, buffers: Buffers) -> None:
        self.model.parameters[each.name.index].data = buffers[WEIGHT, each.name].view(each.weight.shape)

    def describe(self) -> tuple[Buffers, Scalars]:
        buffers, scalars = super().describe()
        level_counts(self.basic, scalars, [tensor.group for tensor in self.model.tensors])
        fill_absent(self.basic, self.model, buffers, scalars)
        return buffers, scalars

    def census(self) -> list[Found]:
        """Return where whole tensors lie: the parameters, and the masters that the optimizer steps."""
        rows = super().census()
        for number, master in enumerate(self._masters()):
            rows += rows_of(MASTER, master, [(number, 0, master.numel())])
        return rows


def count_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> None:
    """Give the placeholder element of each empty optimizer group a zero gradient, so that the next step counts it.

    Called before a step of a plain torch optimizer; see `fill_empty_groups`.
    """
    for holder in _holders_of_empty_groups(optimizer, model).values():
        holder.grad = torch.zeros_like(holder)


def _holders_of_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[int, torch.Tensor]:
    """Return a map from the number of each empty optimizer group to its placeholder element."""
    groups = enumerate(optimizer.param_groups)
    return {number: group["params"][-1] for number, group in groups if is_empty_group(model, number)}


class FlatGroups(ZeroStage):
    """Stages with a flat weight buffer and a flat fp32 master (the whole or a rank's part) for each optimizer group."""

    flats: ClassVar[str]
    masters: ClassVar[str]
    tensors: ClassVar[str]
    """Names of the attributes in which DeepSpeed's optimizer lists the flat weights, the masters, and the tensors of
    each group."""

    def slots(self, group: int) -> Slots:
        """Return (tensor number, position, number of elements) for each tensor of a group, from DeepSpeed's own
        records.
        """
        return end_to_end(self.model, getattr(self.zero, self.tensors)[group])

    def stepped(self) -> Iterator[Stepped]:
        held, partly = self.zero, getattr(self.zero, "params_in_partition", None)
        for group, pair in enumerate(zip(getattr(held, self.flats), getattr(held, self.masters), strict=True)):
            tensors = [number for number, tensor in enumerate(self.model.tensors) if tensor.group == group != FROZEN]
            whole = None if partly is None else sum(map(torch.Tensor.numel, partly[group]))
            yield Stepped(BufferId("group", group), group, tensors, *pair, is_empty_group(self.model, group), whole)

    def put_weight(self, each: Stepped, buffers: Buffers) -> None:
        flat = buffers[WEIGHT, each.name]
        getattr(self.zero, self.flats)[each.group] = flat
        for number, at, numel in self.slots(each.group):
            self.model.parameters[number].data = flat.narrow(0, at, numel).view(self.model.tensors[number].shape)

    def census(self) -> list[Found]:
        """Return where weights and masters lie: whole weights at the parameters' addresses, masters in the order of the
        group.

        Moments that are kept for whole tensors are listed in the order in which DeepSpeed reads them. Offloaded
        gradients are listed at the positions to which the reduction copies them (`grad_position`).
        """
        held, basic, rows = self.zero, self.basic, super().census()
        for each in self.stepped():
            if each.is_empty:
                continue
            peers = getattr(held, "real_dp_process_group", None)  # FP16_Optimizer has whole masters
            low = 0 if peers is None else dist.get_rank(group=peers[each.group]) * each.master.numel()
            rows += rows_of(MASTER, each.master, self.slots(each.group), low)
            partly = () if each.whole is None else held.params_in_partition[each.group]
            for name in rule_of(basic).whole_tensors:
                moment = basic.state.get(each.master, {}).get(name)
                if moment is not None:
                    rows += rows_of(name, moment, end_to_end(self.model, partly))
            for parameter in partly if keeps_gradients(held) else ():
                gradient = held.single_partition_of_fp32_groups[each.group].grad
                _, start, offset, numel = held.grad_position[held.get_param_id(parameter)]
                address = gradient.data_ptr() + offset * gradient.element_size()
                rows.append(Found(HOST_GRAD, self.model.numbers[id(parameter)], start, numel, address))
        return rows

    def refill(self, buffers: Buffers, scalars: Scalars) -> None:
        """Put buffers into the optimizer. Also link parameters to their parts of the masters, and masters to moments.

        DeepSpeed would link moments only in the next step, and until then `safe_get_full_optimizer_state` would not
        find them. FP16_Optimizer has no such links.
        """
        super().refill(buffers, scalars)
        held = self.zero
        if isinstance(held, FP16_Optimizer):
            return
        link_fragments(held)
        if all(held.optimizer.state.get(group["params"][0]) for group in held.optimizer.param_groups):
            held._lazy_init_hp_params_optimizer_state()


class FusedStage(FlatGroups):
    """Stage of `FP16_Optimizer`: flat weights and flat masters are whole on every rank."""

    flats, masters, tensors = "fp16_groups_flat", "fp32_groups_flat", "fp16_groups"


class FlatStages(FlatGroups):
    """ZeRO stages 1 and 2: whole flat weights, and one part of the fp32 master."""

    flats, masters, tensors = "bit16_groups_flat", "single_partition_of_fp32_groups", "round_robin_bit16_groups"

    def slots(self, group: int) -> Slots:
        """Return (tensor number, position, number of elements) for each tensor, in the flat order that DeepSpeed's
        reduction uses.
        """
        ordered = zip(self.zero.round_robin_bit16_groups[group], flat_offsets(self.zero, group), strict=True)
        return [(self.model.numbers[id(each)], offset, each.numel()) for each, offset in ordered]

    def put_weight(self, each: Stepped, buffers: Buffers) -> None:
        super().put_weight(each, buffers)
        parts = self.zero.get_data_parallel_partitions(buffers[WEIGHT, each.name], each.group)
        self.zero.parallel_partitioned_bit16_groups[each.group] = parts


class AccumulatingStage(FlatGroups):
    """Stage of `BF16_Optimizer`: whole flat weights, and one part of the fp32 master."""

    flats, masters, tensors = "bf16_groups_flat", "fp32_groups_flat_partition", "bf16_groups"

    def put_weight(self, each: Stepped, buffers: Buffers) -> None:
        super().put_weight(each, buffers)
        parts = buffers[WEIGHT, each.name].split(each.master.numel())
        self.zero.bf16_partitioned_groups[each.group] = list(parts)


class PartitionedStage(ZeroStage):
    """ZeRO stage 3: every parameter is partitioned over the ranks."""

    alone = "partition"

    def stepped(self) -> Iterator[Stepped]:
        zero = self.zero
        for index, master in enumerate(zero.fp32_partitioned_groups_flat):
            tensors = [self.model.numbers[id(parameter)] for parameter in zero.fp16_groups[index]]
            weight, group = zero.fp16_partitioned_groups_flat[index], self.model.tensors[tensors[0]].group
            yield Stepped(BufferId("subgroup", index), group, tensors, weight, master)

    def put_weight(self, each: Stepped, buffers: Buffers) -> None:
        """Make each parameter's part, and its last gradient, a view of the given buffers."""
        zero, weight, position = self.zero, buffers[WEIGHT, each.name], 0
        each.weight.data = weight
        for parameter in zero.fp16_groups[each.name.index]:
            size = parameter.ds_tensor.ds_numel
            parameter.ds_tensor.data = weight.narrow(0, position, size)
            last = buffers[STALE_GRAD, each.name].narrow(0, position, size)
            getattr(zero, _GRADIENT_PARTS)[parameter.ds_id] = last
            position += size

    def describe(self) -> tuple[Buffers, Scalars]:
        buffers, scalars = super().describe()
        masters = self.zero.fp32_partitioned_groups_flat
        sizes = [master.numel() for master in masters]
        gradients = self.zero.grad_partitions_flat_buffer.split(sizes)
        buffers.update({(STALE_GRAD, BufferId("subgroup", index)): last for index, last in enumerate(gradients)})
        return buffers, scalars

    def census(self) -> list[Found]:
        """Return where each part lies: by `ds_tensor` for weights, and by `grad_position` for masters and gradients."""
        zero = self.zero
        rows = []
        parameter: Any
        for index, parameter in enumerate(self.model.parameters):
            part = parameter.ds_tensor.numel()
            start = dist.get_rank(group=parameter.ds_process_group) * part
            numel = max(0, min(part, parameter.ds_numel - start))
            if not numel:
                continue
            rows.append(Found(WEIGHT, index, start, numel, parameter.ds_tensor.data_ptr()))
            if index < self.model.trainable:
                group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
                master = zero.fp32_partitioned_groups_flat[group]
                beside = {MASTER: master, **({HOST_GRAD: master.grad} if keeps_gradients(zero) else {})}
                for kind, held in beside.items():
                    rows.append(Found(kind, index, start, numel, held.data_ptr() + offset * held.element_size()))
                last = getattr(zero, _GRADIENT_PARTS)[parameter.ds_id]
                rows.append(Found(STALE_GRAD, index, start, numel, last.data_ptr()))
        return rows

    def release(self) -> None:
        """Remove patched containers and attributes from the module. Parameters keep no data.

        Under torch autocast, DeepSpeed leaves a gathered parameter in the low-precision type, so its type is set back
        to that of the model.
        """
        reset_counters()
        offload = getattr(self.zero, "parameter_offload", None)
        if offload is not None:  # hook classes keep it, and with it groups, in cycles
            offload.get_param_coordinator().__dict__.clear()
            offload.__dict__.clear()
        for parameter in self.model.parameters:
            for cell in getattr(getattr(parameter, "partition", None), "__closure__", None) or ():
                held = cell.cell_contents
                if isinstance(held, Init):  # it refers to groups, and is in cycles with its methods
                    held.__dict__.clear()
            forget_parameter(parameter)
        self.model.drop_data()
        for module in self.engine.module.modules():
            forget_module(module)
        restore_linear()

    def refill(self, buffers: Buffers, scalars: Scalars) -> None:
        super().refill(buffers, scalars)
        zero = self.zero
        # host memory of `offload_param`: one block per optimizer group, of which its sub-groups are slices; the blocks
        # are separate if DeepSpeed allocated them, and contiguous if a switch did
        for group, old in enumerate(zero.param_groups_fp16_flat_cpu_memory if zero.offload_param else ()):
            first = min(index for index, owner in zero.sub_group_to_group_id.items() if owner == group)
            held = buffers[WEIGHT, BufferId("subgroup", first)]
            memory = held.as_strided((old.numel(),), (1,), held.storage_offset())
            zero.param_groups_fp16_flat_cpu_memory[group] = memory
        if not zero.offload_param:
            zero.lp_param_buffer = whole(buffers, WEIGHT)
        zero.grad_partitions_flat_buffer = whole(buffers, STALE_GRAD)


STAGES: tuple[tuple[type, type[ZeroStage]], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, PartitionedStage),
    (DeepSpeedZeroOptimizer, FlatStages),
    (BF16_Optimizer, AccumulatingStage),
    (FP16_Optimizer, FusedStage),
    (FP16_UnfusedOptimizer, ReplicatedStage),
    (torch.optim.Optimizer, ReplicatedStage),
)
"""Pairs of optimizer class and stage. The first class of which an optimizer is an instance applies."""


def stage_of(engine: Any, model: ModelMap) -> ZeroStage:
    """Return the `ZeroStage` object for an engine's current optimizer, over the engine's parameters.

    Raises UnsupportedError, naming the optimizer's class, if it is not known.
    """
    for kind, stage in STAGES:
        if isinstance(engine.optimizer, kind):
            return stage(engine, model)
    raise UnsupportedError(
        f"DeepSpeed wrapped the optimizer into a {type(engine.optimizer).__name__}, whose state cannot be moved; leave "
        "the key of the configuration out that asks for it, or leave out the dynatrain block"
    )


# ---- fragments ---------------------------------------------------------------------------------------------------


def link_fragments(zero: Any) -> None:
    """Link the parameters of stages 1 and 2, or of BF16_Optimizer, to the right parts of the masters.

    By itself DeepSpeed may link them by wrong offsets unless it knows of padding between tensors.
    """
    is_reordered = getattr(zero, "round_robin_gradients", False)
    padded = {"round_robin_bit16_padding": [[1]] * len(zero.bit16_groups)} if is_reordered else {}
    with replaced(zero, **padded):
        zero._link_all_hp_params()
    zero._hp_optimizer_states_linked = False
    zero._param_slice_mappings = zero._create_param_mapping()
    if is_reordered and zero.cpu_offload:
        zero._create_optimizer_mapping()


# ---- order of tensors ------------------------------------------------------------------------------------------


@contextmanager
def in_order(engine: Any, model: ModelMap, order: tuple[int, ...] | None) -> Iterator[None]:
    """Context manager in which DeepSpeed's stages 1 and 2 put tensors into flat groups in a layout's order.

    DeepSpeed has one method that reorders tensors, for `round_robin_gradients`.
    """
    if order is None:
        yield
        return
    place = places_of(order, model.trainable)

    def reordered(_: Any, tensors: list[torch.Tensor], ranks: int) -> tuple[list[torch.Tensor], dict[int, int]]:
        old = sorted(range(len(tensors)), key=lambda index: int(place[model.numbers[id(tensors[index])]]))
        return [tensors[index] for index in old], {index: now for now, index in enumerate(old)}

    with (
        replaced(engine, zero_round_robin_gradients=lambda: True),
        replaced(DeepSpeedZeroOptimizer, _round_robin_reorder=reordered),
    ):
        yield


# ---- BF16_Optimizer in pipelines ---------------------------------------------------------------------------------


def count_empty_experts(optimizer: Any, model: ModelMap) -> None:
    """Make a pipeline stage without experts add 0 to the norm of the experts' gradients. Called before a step.

    DeepSpeed sums this norm over pipeline stages in a collective. A stage on which no expert has a gradient would not
    take part in the collective.
    """
    for group, has_gradient in enumerate(optimizer.fp32_groups_has_gradients):
        if is_empty_group(model, group) and optimizer.param_groups[group].get("moe"):
            has_gradient[-1] = True


@contextmanager
def stage_without_gradients(optimizer: Any) -> Iterator[None]:
    """Context manager in which a pipeline stage without gradients adds 0 to the norm, where DeepSpeed would fail."""
    own = optimizer.get_grads_for_norm

    def at_least_one(for_clipping: bool = False) -> Any:
        found = own(for_clipping)
        if for_clipping or found[0]:
            return found
        return [torch.zeros(1, device=compute_device())], found[1]

    with replaced(optimizer, get_grads_for_norm=at_least_one):
        yield


# ---- what stage 3 sets for a process, and on modules and parameters ----------------------------------------------


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
