"""ZeRO stage 0: every rank holds everything, tensor by tensor.

In fp32 the engine's optimizer is the user's torch optimizer on the parameters themselves (weight and master are the
same memory); in bf16 it is FP16_UnfusedOptimizer with one fp32 clone per parameter.

An optimizer group of which a pipeline stage has nothing has an element without meaning there (`fill_empty_groups`),
which counts the group's steps.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from ds_dynatrain.adapters.flat import is_empty_group, tensors_of
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import fill_absent, held_moments, level_counts, read_state, write_state
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import MASTER, WEIGHT, BufferId


def count_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> None:
    """Before a step, let the elements without meaning be stepped, too."""
    for holder in _holders_of_empty_groups(optimizer, model).values():
        holder.grad = torch.zeros_like(holder)


class ReplicatedStage:
    """Stage 0; see the module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """One buffer per tensor and state kind."""
        buffers: Buffers = {}
        scalars = Scalars()
        groups = [tensor.group for tensor in model.tensors]
        for number, parameter in enumerate(model.parameters):
            buffers[WEIGHT, BufferId("tensor", number)] = parameter.data.view(-1)
        for number, master in enumerate(_masters(engine, model)):
            buffers[MASTER, BufferId("tensor", number)] = master.data.view(-1)
            moments, steps = read_state(engine.basic_optimizer, master, groups[number])
            for name, moment in moments.items():
                buffers[name, BufferId("tensor", number)] = moment
            for name, value in steps.items():
                scalars.values.setdefault(name, {})[number] = value
        for group, holder in _holders_of_empty_groups(engine.basic_optimizer, model).items():
            for name, value in read_state(engine.basic_optimizer, holder, group)[1].items():
                scalars.values.setdefault(name, {}).update(dict.fromkeys(tensors_of(model, group), value))
        level_counts(engine.basic_optimizer, scalars, groups)
        fill_absent(engine.basic_optimizer, model, buffers, scalars)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Whole tensors, at the parameters' and masters' own addresses."""
        weights = [(WEIGHT, number, held) for number, held in enumerate(model.parameters)]
        masters = [(MASTER, number, held) for number, held in enumerate(_masters(engine, model))]
        return [Found(kind, number, 0, held.numel(), held.data_ptr()) for kind, number, held in weights + masters]

    def release(self, engine: Any, model: ModelMap) -> None:
        """Drop the gradients; nothing else hangs on the module."""
        for parameter in model.parameters:
            parameter.grad = None

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Parameters, masters and states become views of the buffers."""
        for number, parameter in enumerate(model.parameters):
            parameter.data = buffers[WEIGHT, BufferId("tensor", number)].view(model.tensors[number].shape)
        for number, master in enumerate(_masters(engine, model)):
            name, group = BufferId("tensor", number), model.tensors[number].group
            master.data = buffers[MASTER, name].view(model.tensors[number].shape)
            if not master.numel():
                continue  # the optimizer would not count its steps
            held = held_moments(engine.basic_optimizer, group, buffers, name)
            write_state(engine.basic_optimizer, master, group, held, scalars.of(number))
        for group, holder in _holders_of_empty_groups(engine.basic_optimizer, model).items():
            first = tensors_of(model, group)[0]
            held = held_moments(engine.basic_optimizer, group, buffers, BufferId("tensor", first))
            size, where = holder.numel(), holder.device
            moments = {name: torch.zeros(size, dtype=each.dtype, device=where) for name, each in held.items()}
            write_state(engine.basic_optimizer, holder, group, moments, scalars.of(first))


def _holders_of_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[int, torch.Tensor]:
    """The elements without meaning, by the number of their group."""
    groups = enumerate(optimizer.param_groups)
    return {number: group["params"][-1] for number, group in groups if is_empty_group(model, number)}


def _masters(engine: Any, model: ModelMap) -> list[torch.Tensor] | list[nn.Parameter]:
    """The tensors that the basic optimizer steps, in the order of registration.

    FP16_UnfusedOptimizer has none for a parameter of no element, an expert of another rank's say.
    """
    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return list(model.parameters[: model.trainable])
    held = iter([master for group in engine.optimizer.fp32_groups for master in group])
    return [next(held) if each.numel() else each.new_empty(0) for each in model.parameters[: model.trainable]]
