"""The state of DeepSpeed's optimizers in every ZeRO stage: how it is read, detached and restored.

Each optimizer steps some tensors, the *masters*, with a torch optimizer, and casts weights from them. There is one
master per tensor, per optimizer group (or a rank's part of the group), or per sub-group. A `ZeroStage` determines which
tensors are masters and where DeepSpeed keeps them; reading and writing them is the same for all stages. Moments and
scalars of a master are read and written by the rule of the torch optimizer's class (see `optimizers`).

With ZeRO-Offload, the gradient of a master part (`master.grad`) is allocated once and never cleared (DeepSpeed 0.19.8):
a parameter that got no gradient in a step is stepped with the gradient left from an earlier step. These gradients are
therefore state in stages 1 to 3: `host_grad`. All other fields of offload
(`param_buffer_of_bit16_for_cpu_offload_groups`, `temp_grad_buffer_*`, `accumulated_grads_in_cpu`,
`norm_for_param_grads`) are written before they are read, or cleared by a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ds_dynatrain.adapters.groups.device import HOST, compute_device
from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.adapters.zero.optimizers import full_name, rule_of
from ds_dynatrain.adapters.zero.state import Buffers, Found, Scalars
from ds_dynatrain.errors import CensusError, SwitchRefused
from ds_dynatrain.space import HOST_GRAD, IN_EMPTY_GROUP, MASTER, WEIGHT, BufferId

_PARAMETER_ATTRIBUTES = """
    _hp_mapping _dp_group get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad load_hp_checkpoint_state
    _index_in_param_group param_idx_in_group grad_accum _zero_optimizer _hp_grad
""".split()
Slots = Iterable[tuple[int, int, int]]
"""Rows of (tensor number, position of the tensor's first element in the flat group, number of elements)."""


class Stepped(NamedTuple):
    """A master, and the weights that are cast from it.

    name: the name of the master's buffers.
    group: the number of its optimizer group.
    tensors: the numbers of the logical tensors in the master.
    is_empty: whether it is the placeholder element of a group without tensors on this rank (see `fill_empty_groups`).
    whole: the number of elements of all tensors of which the master has some part, if moments are kept for whole
        tensors (see `read_state`); otherwise None.
    """

    name: BufferId
    group: int
    tensors: list[int]
    weight: torch.Tensor
    master: torch.Tensor
    is_empty: bool = False
    whole: int | None = None


class ZeroStage(ABC):
    """A kind of DeepSpeed optimizer: where its state lies, and how it is detached from a module and restored."""

    def __init__(self, engine: Any, model: ModelMap) -> None:
        self.engine, self.model, self.zero, self.basic = engine, model, engine.optimizer, engine.basic_optimizer

    alone: ClassVar[str] = "tensor"
    """The `BufferId.place` of the buffers of frozen tensors."""

    @abstractmethod
    def stepped(self) -> Iterator[Stepped]:
        """Yield each tensor that the basic optimizer steps."""

    @abstractmethod
    def put_weight(self, each: Stepped, buffers: Buffers) -> None:
        """Make the weights of a master, and the parameters' views of them, use the memory of the given buffer."""

    def describe(self) -> tuple[Buffers, Scalars]:
        """Return the current flat buffers and scalars on this rank."""
        buffers: Buffers = {}
        scalars = Scalars()
        for each in self.stepped():
            moments, counts = read_state(self.basic, each.master, each.group, each.whole)
            held = {WEIGHT: each.weight.data, MASTER: each.master.data, **moments}
            if keeps_gradients(self.zero) and each.master.grad is not None:  # `offload_states` drops it
                held[HOST_GRAD] = each.master.grad.detach()
            for kind, one in held.items():
                buffers[kind, each.name] = one.view(-1)[: 0 if each.is_empty else None]
            for name, value in counts.items():
                scalars.values.setdefault(name, {}).update(dict.fromkeys(each.tensors, value))
        for number, parameter in self.model.frozen():
            buffers[WEIGHT, BufferId(self.alone, number)] = getattr(parameter, "ds_tensor", parameter).data.view(-1)
        return buffers, scalars

    def census(self) -> list[Found]:
        """Return where the elements of each parameter lie in memory, from DeepSpeed's own records, which omit most
        moments.
        """
        rows: list[Found] = []
        for number, parameter in enumerate(self.model.parameters):
            rows += rows_of(WEIGHT, parameter, [(number, 0, parameter.numel())])
        return rows

    def release(self) -> None:
        """Remove the optimizer's attributes, but no buffers, from the module.

        Called after the optimizer's `destroy`.
        """
        for parameter in self.model.parameters:
            parameter.grad = None
            for name in _PARAMETER_ATTRIBUTES:
                parameter.__dict__.pop(name, None)

    def refill(self, buffers: Buffers, scalars: Scalars) -> None:
        """Put real buffers into an optimizer that was built without storage.

        Raises SwitchRefused if tensors that share a master have different scalars.
        """
        basic = self.basic
        for each in self.stepped():
            master, moments = each.master, dict[str, torch.Tensor]()
            for name in rule_of(basic).moments_of(basic.param_groups[each.group]):
                held = buffers.get((name, each.name))  # None before the first step
                if held is not None:
                    moments[name] = torch.zeros_like(master, dtype=held.dtype) if each.is_empty else held
            if not each.is_empty:
                self.put_weight(each, buffers)
                master.data = buffers[MASTER, each.name].view(master.shape)
            if master.numel():  # otherwise the optimizer would not count its steps
                # ranks that have tensors of an empty group compare theirs
                counted = each.tensors[:1] if each.is_empty else each.tensors
                counts = common_scalars(scalars, counted, f"optimizer group {each.group}")
                write_state(basic, master, each.group, moments, counts)
            if keeps_gradients(self.zero):
                kept = buffers[HOST_GRAD, each.name]
                master.grad = kept.view(master.shape) if kept.numel() else torch.zeros_like(master)
        for number, parameter in self.model.frozen():
            part = getattr(parameter, "ds_tensor", parameter)
            part.data = buffers[WEIGHT, BufferId(self.alone, number)].view(part.shape)


def keeps_gradients(zero: Any) -> bool:
    """Return whether a ZeRO optimizer offloads to the host, so that its masters keep their gradients between steps."""
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


def rows_of(kind: str, held: torch.Tensor, slots: Slots, low: int = 0) -> list[Found]:
    """Return the census rows of the tensors of a flat group that overlap `held`.

    slots: position of each tensor in the flat group.
    low: position in the group at which `held` begins.
    """
    rows, high = [], low + held.numel()
    for number, position, numel in slots:
        start, stop = max(position, low), min(position + numel, high)
        if start < stop:
            address = held.data_ptr() + (start - low) * held.element_size()
            rows.append(Found(kind, number, start - position, stop - start, address))
    return rows


def end_to_end(model: ModelMap, parameters: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the slots of parameters that are stored contiguously, one after the other."""
    slots, position = [], 0
    for parameter in parameters:
        slots.append((model.numbers[id(parameter)], position, parameter.numel()))
        position += parameter.numel()
    return slots


def is_empty_group(model: ModelMap, group: int) -> bool:
    """Return whether this rank has no tensor of an optimizer group, because its layers are on other pipeline stages."""
    return not any(tensor.numel for tensor in model.tensors if tensor.group == group)


def fill_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[nn.Parameter, str]:
    """Give each optimizer group without elements one element that belongs to no tensor, because DeepSpeed refuses empty
    groups.

    The element is stepped like any other (without ZeRO see `stages.count_empty_groups`), so a group's step counts are
    the same on all pipeline stages.

    Returns the elements with their names, because DeepSpeed requires a name for every parameter.
    """
    names: dict[nn.Parameter, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        if is_empty_group(model, number):
            shape = (1, 1) if group.get("use_muon") else (1,)  # Muon steps matrices alone
            element: Any = nn.Parameter(torch.zeros(shape, dtype=model.dtype, device=compute_device()))
            if group.get("moe"):
                element.allreduce, element.group_name = False, group["name"]
            else:
                element.ds_pipe_replicated = True  # left out of the norm of gradients
            group["params"] = [*group["params"], element]
            names[element] = f"{IN_EMPTY_GROUP}{number}"
    return names


# ---- moments and scalars of one master ---------------------------------------------------------------------------


def read_state(
    optimizer: torch.optim.Optimizer, holder: torch.Tensor, group: int, whole: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the moments (flat views) and the scalars, keyed by name, that `optimizer` keeps for `holder`.

    holder: the tensor that the optimizer steps.
    group: the number of its optimizer group.
    whole: number of elements of all tensors of which the holder has some part, if moments are kept for whole tensors.

    Both results are empty before the first step. Raises CensusError for states that the optimizer's rule does not list.
    """
    state: dict[str, Any] = optimizer.state.get(holder, {})
    if not state:
        return {}, {}
    rule, settings, kind = rule_of(optimizer), optimizer.param_groups[group], full_name(type(optimizer))
    moments, scalars = rule.moments_of(settings), rule.scalars_of(settings)
    if {*moments, *scalars} ^ set(state):
        raise CensusError(f"{kind} keeps {sorted(state)} in group {group}; expected {[*moments, *scalars]}")
    for name in moments:
        numel = holder.numel() if whole is None or name not in rule.whole_tensors else whole
        if not isinstance(state[name], torch.Tensor) or state[name].numel() != numel:
            raise CensusError(f"{kind}: {name} in group {group} is not one value per element of its tensor")
    return {name: state[name].detach().view(-1) for name in moments}, {name: float(state[name]) for name in scalars}


def write_state(
    optimizer: torch.optim.Optimizer,
    holder: torch.Tensor,
    group: int,
    moments: dict[str, torch.Tensor],
    scalars: dict[str, float],
) -> None:
    """Give `holder` these moments (in its shape, unless it is flat) and scalars. Does nothing if both are empty.

    Scalars get the types of their first values. torch's fused optimizers keep counts on the stepped tensor's device.
    """
    if not moments and not scalars:
        return
    settings, state = optimizer.param_groups[group], dict[str, Any]()
    first, device = rule_of(optimizer).scalars_of(settings), holder.device if settings.get("fused") else HOST
    for name, value in scalars.items():
        like = first[name]
        if isinstance(like, torch.Tensor):
            state[name] = torch.tensor(value, dtype=like.dtype, device=device)
        else:
            state[name] = type(like)(value)
    for name, flat in moments.items():
        state[name] = flat if holder.dim() == 1 else flat.view(holder.shape)
    optimizer.state[holder] = state


def common_scalars(scalars: Scalars, tensors: list[int], where: str) -> dict[str, float]:
    """Return the scalars that all `tensors` of one flat buffer share.

    Raises SwitchRefused if they differ: a tensor that was left out of some steps cannot share a step count with the
    others.
    """
    common: dict[str, float] = {}
    for name, table in scalars.values.items():
        for tensor in tensors:
            if table.get(tensor) != table.get(tensors[0]):
                raise SwitchRefused(
                    f"{where}: tensor {tensors[0]} has {scalars.of(tensors[0])}, tensor {tensor} has "
                    f"{scalars.of(tensor)}, and the target layout keeps one value for both",
                    "stay in ZeRO stage 0, or give such parameters an optimizer group of their own",
                )
        if tensors and tensors[0] in table:
            common[name] = table[tensors[0]]
    return common


def level_counts(optimizer: torch.optim.Optimizer, scalars: Scalars, groups: Sequence[int]) -> None:
    """Set each tensor's step count to the highest one in its group.

    Does nothing unless the optimizer counts on one tensor for the whole group.

    groups: the optimizer group of each tensor number.
    """
    if not rule_of(optimizer).counts_by_group:
        return
    for table in scalars.values.values():
        highest: dict[int, float] = {}
        for tensor, value in table.items():
            highest[groups[tensor]] = max(value, highest.get(groups[tensor], value))
        table.update({tensor: highest[groups[tensor]] for tensor in table})


def fill_absent(optimizer: torch.optim.Optimizer, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
    """Add empty moments, and step counts, for trained tensors that only other pipeline stages hold.

    The counts are copied from a tensor on this rank, of the same group if possible. If that tensor was left out of a
    step, the counts of the pipeline stages disagree, which the certificate of the switch reports.
    """
    counted = {number for table in scalars.values.values() for number in table}
    for number, tensor in enumerate(model.tensors[: model.trainable]):
        beside = [other for other in counted if model.tensors[other].group == tensor.group] or list(counted)
        if tensor.numel or not beside:
            continue
        rule, settings = rule_of(optimizer), optimizer.param_groups[tensor.group]
        for name in rule.moments_of(settings):
            like = next((held for (kind, _), held in buffers.items() if kind == name), torch.empty(0))
            buffers[name, BufferId("tensor", number)] = like.new_empty(0)
        for name in rule.scalars_of(settings):
            scalars.values.setdefault(name, {})[number] = max(scalars.of(other).get(name, 0.0) for other in beside)
