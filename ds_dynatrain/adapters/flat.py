"""What DeepSpeed's optimizers over flat groups have in common, whatever they call their lists.

Per optimizer group one flat weight buffer, and one flat fp32 tensor (a rank's part of it, or the whole) that the basic
optimizer steps; frozen tensors stand alone. `stage12`, `bf16` and `stage0_fused` say where DeepSpeed keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import common_scalars, held_moments, read_state, write_state
from ds_dynatrain.adapters.optimizers import rule_of
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, BufferId

IN_HOLLOW_GROUP = "no tensor of group "

Slots = Iterable[tuple[int, int, int]]
"""(tensor number, position of its first element in the flat group, elements)."""


def is_hollow(model: ModelMap, group: int) -> bool:
    """Whether this rank has nothing of an optimizer group: its layers are on other pipeline stages."""
    return not any(tensor.numel for tensor in model.tensors if tensor.group == group)


def fill_hollow_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[nn.Parameter, str]:
    """Give each hollow group one element that belongs to no tensor: DeepSpeed takes no group without one.

    It gets no gradient, and its state is counted along, so a group's counts are the same on all stages. Returns their
    names: DeepSpeed asks for that of every parameter.
    """
    names: dict[nn.Parameter, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        if is_hollow(model, number):
            element: Any = nn.Parameter(torch.zeros(1, dtype=model.dtype))
            if group.get("moe"):
                element.allreduce, element.group_name = False, group["name"]
            else:
                element.ds_pipe_replicated = True  # not counted in the norm of gradients
            group["params"] = [*group["params"], element]
            names[element] = f"{IN_HOLLOW_GROUP}{number}"
    return names


def describe_groups(
    engine: Any,
    model: ModelMap,
    flats: Iterable[torch.Tensor],
    masters: Iterable[torch.Tensor],
    whole: Sequence[int] | None = None,
) -> tuple[Buffers, Scalars]:
    """Per group: the flat weights, this rank's master and moments; frozen tensors one by one.

    whole: per group, elements of all tensors of which the rank has a part (see `read_state`).
    """
    buffers: Buffers = {}
    scalars = Scalars()
    for group, (flat, master) in enumerate(zip(flats, masters, strict=True)):
        name, end = BufferId("group", group), 0 if is_hollow(model, group) else None
        buffers[WEIGHT, name], buffers[MASTER, name] = flat.data[:end], master.data[:end]
        moments, steps = read_state(engine.basic_optimizer, master, group, None if whole is None else whole[group])
        buffers.update({(kind, name): moment[:end] for kind, moment in moments.items()})
        for kind, value in steps.items():
            scalars.values.setdefault(kind, {}).update(dict.fromkeys(tensors_of(model, group), value))
    for number, parameter in model.frozen():
        buffers[WEIGHT, BufferId("tensor", number)] = parameter.data.view(-1)
    return buffers, scalars


def weight_rows(model: ModelMap) -> list[Found]:
    """Where the weights lie: whole, at the parameters' own addresses."""
    return [Found(WEIGHT, index, 0, held.numel(), held.data_ptr()) for index, held in enumerate(model.parameters)]


def master_rows(master: torch.Tensor, low: int, slots: Slots) -> list[Found]:
    """What of a flat group lies in `master`, which holds its positions from `low` on."""
    rows, high = [], low + master.numel()
    for number, position, numel in slots:
        start, stop = max(position, low), min(position + numel, high)
        if start < stop:
            address = master.data_ptr() + (start - low) * master.element_size()
            rows.append(Found(MASTER, number, start - position, stop - start, address))
    return rows


def whole_rows(engine: Any, model: ModelMap, master: torch.Tensor, parameters: Iterable[torch.Tensor]) -> list[Found]:
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


def refill_master(
    engine: Any, model: ModelMap, group: int, master: torch.Tensor, buffers: Buffers, scalars: Scalars
) -> None:
    """A group's master, its moments and its counts become the given ones."""
    name = BufferId("group", group)
    held = held_moments(engine.basic_optimizer, group, buffers, name)
    if is_hollow(model, group):
        held = {moment: torch.zeros_like(master, dtype=empty.dtype) for moment, empty in held.items()}
    else:
        master.data = buffers[MASTER, name]
    steps = common_scalars(scalars, tensors_of(model, group), f"optimizer group {group}")
    write_state(engine.basic_optimizer, master, group, held, steps)


def refill_frozen(model: ModelMap, buffers: Buffers) -> None:
    """Frozen parameters become views of their buffers."""
    for number, parameter in model.frozen():
        parameter.data = buffers[WEIGHT, BufferId("tensor", number)].view(model.tensors[number].shape)


def tensors_of(model: ModelMap, group: int) -> list[int]:
    """Numbers of the trainable tensors of an optimizer group."""
    return [number for number, tensor in enumerate(model.tensors) if tensor.group == group != FROZEN]
