"""What DeepSpeed's optimizers over flat groups have in common, whatever they call their lists.

Per optimizer group one flat weight buffer, and one flat fp32 tensor (a rank's part of it, or the whole) that the basic
optimizer steps; frozen tensors stand alone. `stage12`, `bf16` and `stage0_fused` say where DeepSpeed keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.device import compute_device
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import common_scalars, held_moments, read_state, write_state
from ds_dynatrain.adapters.optimizers import rule_of
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import FROZEN, IN_EMPTY_GROUP, MASTER, WEIGHT, BufferId

_PARAMETER_ATTRIBUTES = """
    _hp_mapping _dp_group get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad load_hp_checkpoint_state
    _index_in_param_group param_idx_in_group grad_accum _zero_optimizer _hp_grad
""".split()
Slots = Iterable[tuple[int, int, int]]
"""(tensor number, position of its first element in the flat group, elements)."""


def is_empty_group(model: ModelMap, group: int) -> bool:
    """Whether this rank has nothing of an optimizer group: its layers are on other pipeline stages."""
    return not any(tensor.numel for tensor in model.tensors if tensor.group == group)


def fill_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[nn.Parameter, str]:
    """Give each empty group one element that belongs to no tensor: DeepSpeed takes no group without one.

    Its state is counted along (without ZeRO see `stage0.count_empty_groups`), so a group's counts are the same on all
    stages. Returns their names: DeepSpeed asks for that of every parameter.
    """
    names: dict[nn.Parameter, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        if is_empty_group(model, number):
            shape = (1, 1) if group.get("use_muon") else (1,)  # Muon steps matrices alone
            element: Any = nn.Parameter(torch.zeros(shape, dtype=model.dtype, device=compute_device()))
            if group.get("moe"):
                element.allreduce, element.group_name = False, group["name"]
            else:
                element.ds_pipe_replicated = True  # not counted in the norm of gradients
            group["params"] = [*group["params"], element]
            names[element] = f"{IN_EMPTY_GROUP}{number}"
    return names


class FlatGroups(ABC):
    """The verbs (see `state`) over flat groups; a subclass says where DeepSpeed keeps these."""

    @abstractmethod
    def flats(self, held: Any) -> Sequence[torch.Tensor]:
        """The flat weights of each group."""

    @abstractmethod
    def masters(self, held: Any) -> Sequence[torch.Tensor]:
        """What the basic optimizer steps of each group."""

    @abstractmethod
    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """(the first position that the master has, where DeepSpeed says that the tensors of a group lie)."""

    @abstractmethod
    def put_weights(self, held: Any, model: ModelMap, group: int, flat: torch.Tensor) -> None:
        """Flat weights of a group, and the parameters' views of them, become `flat`."""

    def whole(self, held: Any, group: int) -> Iterable[torch.Tensor] | None:
        """The parameters for which moments of whole tensors are kept (see `read_state`), where there may be such."""
        return None

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Per group: the flat weights, this rank's master and moments; frozen tensors one by one."""
        held = engine.optimizer
        buffers: Buffers = {}
        scalars = Scalars()
        for group, (flat, master) in enumerate(zip(self.flats(held), self.masters(held), strict=True)):
            name, end = BufferId("group", group), 0 if is_empty_group(model, group) else None
            buffers[WEIGHT, name], buffers[MASTER, name] = flat.data[:end], master.data[:end]
            touched = self.whole(held, group)
            numel = None if touched is None else sum(parameter.numel() for parameter in touched)
            moments, steps = read_state(engine.basic_optimizer, master, group, numel)
            buffers.update({(kind, name): moment[:end] for kind, moment in moments.items()})
            for kind, value in steps.items():
                scalars.values.setdefault(kind, {}).update(dict.fromkeys(tensors_of(model, group), value))
        for number, parameter in model.frozen():
            buffers[WEIGHT, BufferId("tensor", number)] = parameter.data.view(-1)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Weights whole, at the parameters' own addresses; masters from DeepSpeed's own order of a group.

        Moments of whole tensors in the order in which it reads them.
        """
        held = engine.optimizer
        rows = [Found(WEIGHT, number, 0, each.numel(), each.data_ptr()) for number, each in enumerate(model.parameters)]
        for group, master in enumerate(self.masters(held)):
            if not is_empty_group(model, group):
                rows += _master_rows(master, *self.slots(held, model, group))
                rows += _whole_rows(engine, model, master, self.whole(held, group) or ())
        return rows

    def release(self, engine: Any, model: ModelMap) -> None:
        """Take gradients and DeepSpeed's attributes off the parameters."""
        for parameter in model.parameters:
            parameter.grad = None
            for name in _PARAMETER_ATTRIBUTES:
                parameter.__dict__.pop(name, None)

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Weights, masters, moments and counts become the given ones."""
        held = engine.optimizer
        for group, master in enumerate(self.masters(held)):
            _refill_master(engine, model, group, master, buffers, scalars)
            if not is_empty_group(model, group):
                self.put_weights(held, model, group, buffers[WEIGHT, BufferId("group", group)])
        for number, parameter in model.frozen():
            parameter.data = buffers[WEIGHT, BufferId("tensor", number)].view(model.tensors[number].shape)


def _master_rows(master: torch.Tensor, low: int, slots: Slots) -> list[Found]:
    """What of a flat group lies in `master`, which holds its positions from `low` on."""
    rows, high = [], low + master.numel()
    for number, position, numel in slots:
        start, stop = max(position, low), min(position + numel, high)
        if start < stop:
            address = master.data_ptr() + (start - low) * master.element_size()
            rows.append(Found(MASTER, number, start - position, stop - start, address))
    return rows


def _whole_rows(engine: Any, model: ModelMap, master: torch.Tensor, parameters: Iterable[torch.Tensor]) -> list[Found]:
    """Where moments of whole tensors lie: for each of `parameters`, of which `master` has a part, one after another."""
    state, rows = engine.basic_optimizer.state.get(master, {}), []
    for name in rule_of(engine.basic_optimizer).whole_tensors:
        for number, position, numel in end_to_end(model, parameters) if name in state else ():
            address = state[name].data_ptr() + position * state[name].element_size()
            rows.append(Found(name, number, 0, numel, address))
    return rows


def end_to_end(model: ModelMap, parameters: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Slots of parameters that follow one another."""
    number = {id(parameter): index for index, parameter in enumerate(model.parameters)}
    slots, position = [], 0
    for parameter in parameters:
        slots.append((number[id(parameter)], position, parameter.numel()))
        position += parameter.numel()
    return slots


def _refill_master(
    engine: Any, model: ModelMap, group: int, master: torch.Tensor, buffers: Buffers, scalars: Scalars
) -> None:
    """A group's master, its moments and its counts become the given ones."""
    name = BufferId("group", group)
    held = held_moments(engine.basic_optimizer, group, buffers, name)
    if is_empty_group(model, group):
        held = {moment: torch.zeros_like(master, dtype=empty.dtype) for moment, empty in held.items()}
    else:
        master.data = buffers[MASTER, name]
    steps = common_scalars(scalars, tensors_of(model, group), f"optimizer group {group}")
    write_state(engine.basic_optimizer, master, group, held, steps)


def tensors_of(model: ModelMap, group: int) -> list[int]:
    """Numbers of the trainable tensors of an optimizer group."""
    return [number for number, tensor in enumerate(model.tensors) if tensor.group == group != FROZEN]
