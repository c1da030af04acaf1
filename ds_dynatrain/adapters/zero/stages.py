"""Choice of the `ZeroStage` for a DeepSpeed optimizer, by its class rather than its number; stages 0, 1 and 2.

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
setters and the universal checkpoint read and write the elements of other parameters. `correct_fragments` corrects the
links.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import deepspeed.comm as dist
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import link_hp_params

from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.adapters.versions.deepspeed_versions import flat_offsets
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.adapters.zero.offload import keeps_gradients
from ds_dynatrain.adapters.zero.optimizers import rule_of
from ds_dynatrain.adapters.zero.stage3 import PartitionedStage
from ds_dynatrain.adapters.zero.state import Buffers, Found, Scalars
from ds_dynatrain.adapters.zero.zero_stage import (
    Slots,
    Stepped,
    ZeroStage,
    end_to_end,
    fill_absent,
    is_empty_group,
    level_counts,
    rows_of,
)
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import FROZEN, HOST_GRAD, MASTER, WEIGHT, BufferId
from ds_dynatrain.space.zero import places_of


class ReplicatedStage(ZeroStage):
    """ZeRO stage 0: every rank holds every tensor whole.

    If a pipeline stage has no tensor of an optimizer group, a placeholder element (see `fill_empty_groups`) counts the
    group's steps on that stage.
    """

    def stepped(self, engine: Any, model: ModelMap) -> Iterator[Stepped]:
        for number, master in enumerate(_masters(engine, model)):
            group = model.tensors[number].group
            yield Stepped(BufferId("tensor", number), group, [number], model.parameters[number], master)
        for group, holder in _holders_of_empty_groups(engine.basic_optimizer, model).items():
            tensors = [number for number, tensor in enumerate(model.tensors) if tensor.group == group]
            yield Stepped(BufferId("tensor", tensors[0]), group, tensors, holder, holder, is_empty=True)

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        model.parameters[each.name.index].data = buffers[WEIGHT, each.name].view(each.weight.shape)

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        buffers, scalars = super().describe(engine, model)
        level_counts(engine.basic_optimizer, scalars, [tensor.group for tensor in model.tensors])
        fill_absent(engine.basic_optimizer, model, buffers, scalars)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Return the whole tensors, at the addresses of the parameters and of the masters."""
        rows = super().census(engine, model)
        for number, master in enumerate(_masters(engine, model)):
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


def _masters(engine: Any, model: ModelMap) -> list[torch.Tensor]:
    """Return the tensors that the basic optimizer steps at stage 0, in the order of registration.

    FP16_UnfusedOptimizer has no master for a parameter without elements, such as an expert of another rank.
    """
    parameters = model.parameters[: model.trainable]
    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return list(parameters)
    held = iter([master for group in engine.optimizer.fp32_groups for master in group])
    return [next(held) if each.numel() else torch.empty_like(each, dtype=torch.float32) for each in parameters]


class FlatGroups(ZeroStage):
    """Stages with a flat weight buffer and a flat fp32 master (the whole or a rank's part) for each optimizer group."""

    flats: ClassVar[str]
    masters: ClassVar[str]
    """Names of the attributes in which DeepSpeed's optimizer lists flat weights and masters."""

    @abstractmethod
    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """Return where this rank's master begins in a flat group, and the slots of the group's tensors.

        held: DeepSpeed's optimizer.

        Both results come from DeepSpeed's own bookkeeping.
        """

    def stepped(self, engine: Any, model: ModelMap) -> Iterator[Stepped]:
        held, partly = engine.optimizer, getattr(engine.optimizer, "params_in_partition", None)
        for group, pair in enumerate(zip(getattr(held, self.flats), getattr(held, self.masters), strict=True)):
            tensors = [number for number, tensor in enumerate(model.tensors) if tensor.group == group != FROZEN]
            whole = None if partly is None else sum(map(torch.Tensor.numel, partly[group]))
            yield Stepped(BufferId("group", group), group, tensors, *pair, is_empty_group(model, group), whole)

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Return weights as whole tensors at the parameters' addresses, and masters in DeepSpeed's order in a group.

        Moments that are kept for whole tensors are listed in the order in which DeepSpeed reads them. Offloaded
        gradients are listed at the positions to which the reduction copies them (`grad_position`).
        """
        held, basic, rows = engine.optimizer, engine.basic_optimizer, super().census(engine, model)
        for each in self.stepped(engine, model):
            if each.is_empty:
                continue
            low, slots = self.slots(held, model, each.group)
            rows += rows_of(MASTER, each.master, slots, low)
            partly = () if each.whole is None else held.params_in_partition[each.group]
            for name in rule_of(basic).whole_tensors:
                moment = basic.state.get(each.master, {}).get(name)
                if moment is not None:
                    rows += rows_of(name, moment, end_to_end(model, partly))
            for parameter in partly if keeps_gradients(held) else ():
                gradient = held.single_partition_of_fp32_groups[each.group].grad
                _, start, offset, numel = held.grad_position[held.get_param_id(parameter)]
                address = gradient.data_ptr() + offset * gradient.element_size()
                rows.append(Found(HOST_GRAD, model.numbers[id(parameter)], start, numel, address))
        return rows

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Put buffers in as all stages do. Also link parameters to their parts of the masters, and masters to moments.

        DeepSpeed would link moments only in the next step, and `safe_get_full_optimizer_state` would not find them
        before that step. FP16_Optimizer has no such links.
        """
        super().refill(engine, model, buffers, scalars)
        held = engine.optimizer
        if isinstance(held, FP16_Optimizer):
            return
        held._link_all_hp_params()
        held._hp_optimizer_states_linked = False
        held._param_slice_mappings = held._create_param_mapping()
        correct_fragments(held)
        if all(held.optimizer.state.get(group["params"][0]) for group in held.optimizer.param_groups):
            held._lazy_init_hp_params_optimizer_state()


class FusedStage(FlatGroups):
    """Stage of `FP16_Optimizer`: flat weights and flat masters are whole on every rank."""

    flats, masters = "fp16_groups_flat", "fp32_groups_flat"

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        return 0, end_to_end(model, held.fp16_groups[group])

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        held, flat = engine.optimizer, buffers[WEIGHT, each.name]
        held.fp16_groups_flat[each.group] = flat
        for number, at, numel in end_to_end(model, held.fp16_groups[each.group]):
            model.parameters[number].data = flat.narrow(0, at, numel).view(model.tensors[number].shape)


class FlatStages(FlatGroups):
    """ZeRO stages 1 and 2: whole flat weights, and one part of the fp32 master."""

    flats, masters = "bit16_groups_flat", "single_partition_of_fp32_groups"

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """Return the start of this rank's master, and the slots in the flat order kept for DeepSpeed's reduction."""
        size = int(held.partition_size[group])  # 0.18 has a float
        low = dist.get_rank(group=held.real_dp_process_group[group]) * size
        ordered = zip(held.round_robin_bit16_groups[group], flat_offsets(held, group), strict=True)
        return low, [(model.numbers[id(each)], offset, each.numel()) for each, offset in ordered]

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        held, group, flat = engine.optimizer, each.group, buffers[WEIGHT, each.name]
        held.bit16_groups_flat[group] = flat
        held._update_model_bit16_weights(group)
        held.parallel_partitioned_bit16_groups[group] = held.get_data_parallel_partitions(flat, group)


class AccumulatingStage(FlatGroups):
    """Stage of `BF16_Optimizer`: whole flat weights, and one part of the fp32 master."""

    flats, masters = "bf16_groups_flat", "fp32_groups_flat_partition"

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        rank = dist.get_rank(group=held.real_dp_process_group[group])
        return rank * held.fp32_groups_flat_partition[group].numel(), end_to_end(model, held.bf16_groups[group])

    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        held, group, flat = engine.optimizer, each.group, buffers[WEIGHT, each.name]
        held.bf16_groups_flat[group] = flat
        held._update_storage_to_flattened_tensor(held.bf16_groups[group], flat)
        held.bf16_partitioned_groups[group] = list(flat.split(each.master.numel()))


STAGES: tuple[tuple[type, ZeroStage], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, PartitionedStage()),
    (DeepSpeedZeroOptimizer, FlatStages()),
    (BF16_Optimizer, AccumulatingStage()),
    (FP16_Optimizer, FusedStage()),
    (FP16_UnfusedOptimizer, ReplicatedStage()),
    (torch.optim.Optimizer, ReplicatedStage()),
)
"""Pairs of optimizer class and stage. The first class of which an optimizer is an instance applies."""


def stage_of(optimizer: object) -> ZeroStage:
    """Return the stage of an engine's current optimizer.

    Raises UnsupportedError, naming the class, if there is none.
    """
    for kind, stage in STAGES:
        if isinstance(optimizer, kind):
            return stage
    raise UnsupportedError(
        f"DeepSpeed wrapped the optimizer into a {type(optimizer).__name__}, whose state cannot be moved; leave the "
        "key of the configuration out that asks for it, or leave out the dynatrain block"
    )


# ---- fragments ---------------------------------------------------------------------------------------------------


def correct_fragments(zero: Any) -> None:
    """Link parameters of stages 1 and 2 to their masters by their true offsets. Does nothing for other optimizers."""
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
        replaced(engine, "zero_round_robin_gradients", lambda: True),
        replaced(DeepSpeedZeroOptimizer, "_round_robin_reorder", reordered),
    ):
        yield


# ---- BF16_Optimizer in pipelines ---------------------------------------------------------------------------------


def count_empty_experts(optimizer: Any, model: ModelMap) -> None:
    """Make a pipeline stage without experts add 0 to the norm of the experts' gradients. Called before a step.

    DeepSpeed sums this norm over pipeline stages in a collective. A stage on which no expert has a gradient would skip
    the collective.
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

    with replaced(optimizer, "get_grads_for_norm", at_least_one):
        yield
