"""ZeRO stage 0: every rank holds everything, tensor by tensor.

In fp32 the engine's optimizer is the user's torch optimizer on the parameters themselves (weight and master are the
same memory); in bf16 it is FP16_UnfusedOptimizer with one fp32 clone per parameter.

An optimizer group of which a pipeline stage has no tensor has a stand-in element there (`fill_empty_groups`), which
counts the group's steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import fill_absent, level_counts
from ds_dynatrain.adapters.stage import Stage, Stepped, is_empty_group
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import MASTER, WEIGHT, BufferId


def count_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> None:
    """Give the stand-in elements of empty groups a gradient of zero before a step, so that they are stepped too."""
    for holder in _holders_of_empty_groups(optimizer, model).values():
        holder.grad = torch.zeros_like(holder)


class ReplicatedStage(Stage):
    """ZeRO stage 0: every rank holds every tensor whole."""

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
        """Return whole tensors, at the parameters' and masters' own addresses."""
        masters = enumerate(_masters(engine, model))
        rows = [Found(MASTER, number, 0, held.numel(), held.data_ptr()) for number, held in masters]
        return super().census(engine, model) + rows

    def counts_of(self, each: Stepped, scalars: Scalars) -> dict[str, float]:
        """Return the scalars of the tensor; those of a group that is empty here equal those of any tensor in it."""
        return scalars.of(each.tensors[0])


def _holders_of_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[int, torch.Tensor]:
    """Return the stand-in elements of empty groups, by the number of their group."""
    groups = enumerate(optimizer.param_groups)
    return {number: group["params"][-1] for number, group in groups if is_empty_group(model, number)}


def _masters(engine: Any, model: ModelMap) -> list[torch.Tensor]:
    """Return the tensors that the basic optimizer steps, in the order of registration.

    FP16_UnfusedOptimizer has none for a parameter without elements, such as an expert of another rank.
    """
    parameters = model.parameters[: model.trainable]
    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return list(parameters)
    held = iter([master for group in engine.optimizer.fp32_groups for master in group])
    return [next(held) if each.numel() else torch.empty_like(each) for each in parameters]
