"""The state of DeepSpeed's optimizers of every ZeRO stage: how it is read, taken off and put back.

Each optimizer steps some tensors, the *masters*, by a torch optimizer, and casts weights from them: a master for each
tensor, for each optimizer group (or a rank's part of it), or for each sub-group. A `Stage` says which tensors are
masters and where DeepSpeed keeps them; reading and writing them is the same for all stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ds_dynatrain.adapters.device import compute_device
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.moments import common_scalars, held_moments, read_state, write_state
from ds_dynatrain.adapters.offload import keeps_gradients
from ds_dynatrain.adapters.optimizers import rule_of
from ds_dynatrain.adapters.state import Buffers, Found, Scalars
from ds_dynatrain.space import FROZEN, HOST_GRAD, IN_EMPTY_GROUP, MASTER, WEIGHT, BufferId

_PARAMETER_ATTRIBUTES = """
    _hp_mapping _dp_group get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad load_hp_checkpoint_state
    _index_in_param_group param_idx_in_group grad_accum _zero_optimizer _hp_grad
""".split()
Slots = Iterable[tuple[int, int, int]]
"""(tensor number, position of its first element in the flat group, elements)."""


class Stepped(NamedTuple):
    """A master, and the weights that are cast from it.

    name: of its buffers. tensors: the numbers of the logical tensors in it. is_empty: whether it is the stand-in
    element of a group of which this rank has no tensor (`fill_empty_groups`). whole: elements of all tensors of which
    it has a part, if moments of whole tensors are kept for these (see `read_state`).
    """

    name: BufferId
    group: int
    tensors: list[int]
    weight: torch.Tensor
    master: torch.Tensor
    is_empty: bool = False
    whole: int | None = None


class Stage(ABC):
    """One kind of DeepSpeed optimizer: where its state lies, and how it is taken off and put on a module."""

    alone: ClassVar[str] = "tensor"
    """Kind of place (`BufferId.place`) of the buffers of frozen tensors."""

    @abstractmethod
    def stepped(self, engine: Any, model: ModelMap) -> Iterator[Stepped]:
        """Yield each tensor that the basic optimizer steps."""

    @abstractmethod
    def put_weight(self, engine: Any, model: ModelMap, each: Stepped, buffers: Buffers) -> None:
        """Make the given buffer the memory of a master's weights, and of the parameters' views of them."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """Return the live flat buffers and scalars on this rank."""
        buffers: Buffers = {}
        scalars = Scalars()
        for each in self.stepped(engine, model):
            moments, counts = read_state(engine.basic_optimizer, each.master, each.group, each.whole)
            held = {WEIGHT: each.weight.data, MASTER: each.master.data, **moments}
            if keeps_gradients(engine.optimizer) and each.master.grad is not None:  # `offload_states` drops it
                held[HOST_GRAD] = each.master.grad.detach()
            end = 0 if each.is_empty else None
            buffers.update({(kind, each.name): one.view(-1)[:end] for kind, one in held.items()})
            for name, value in counts.items():
                scalars.values.setdefault(name, {}).update(dict.fromkeys(each.tensors, value))
        for number, parameter in model.frozen():
            buffers[WEIGHT, BufferId(self.alone, number)] = self.own_part(parameter).data.view(-1)
        return buffers, scalars

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Return where each parameter's elements lie, by DeepSpeed's own bookkeeping; most moments are left out."""
        return [Found(WEIGHT, number, 0, each.numel(), each.data_ptr()) for number, each in enumerate(model.parameters)]

    def release(self, engine: Any, model: ModelMap) -> None:
        """Take attributes off the module, after the optimizer's own `destroy`; the buffers themselves are untouched."""
        for parameter in model.parameters:
            parameter.grad = None
            for name in _PARAMETER_ATTRIBUTES:
                parameter.__dict__.pop(name, None)

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Put real buffers into an optimizer that was built without memory."""
        for each in self.stepped(engine, model):
            master, held = each.master, held_moments(engine.basic_optimizer, each.group, buffers, each.name)
            if each.is_empty:
                held = {moment: torch.zeros_like(master, dtype=empty.dtype) for moment, empty in held.items()}
            else:
                self.put_weight(engine, model, each, buffers)
                master.data = buffers[MASTER, each.name].view(master.shape)
            if master.numel():  # else the optimizer would not count its steps
                write_state(engine.basic_optimizer, master, each.group, held, self.counts_of(each, scalars))
            if keeps_gradients(engine.optimizer):
                kept = buffers[HOST_GRAD, each.name]
                master.grad = kept.view(master.shape) if kept.numel() else torch.zeros_like(master)
        for number, parameter in model.frozen():
            part = self.own_part(parameter)
            part.data = buffers[WEIGHT, BufferId(self.alone, number)].view(part.shape)

    def counts_of(self, each: Stepped, scalars: Scalars) -> dict[str, float]:
        """Return the scalars of a master; SwitchRefused if those of its tensors differ."""
        return common_scalars(scalars, each.tensors, f"optimizer group {each.group}")

    def own_part(self, parameter: Any) -> torch.Tensor:
        """Return the part of a frozen parameter that this rank holds."""
        held: torch.Tensor = parameter
        return held


class FlatGroups(Stage):
    """Stages with a flat weight buffer for each optimizer group, and a flat fp32 master: a rank's part of it, or the
    whole.
    """

    flats: ClassVar[str]
    masters: ClassVar[str]
    """Attributes in which DeepSpeed's optimizer lists flat weights and masters."""

    @abstractmethod
    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """Return the first position that the master has, and the slots of a group's tensors by DeepSpeed's
        bookkeeping.
        """

    def whole(self, held: Any, group: int) -> Iterable[torch.Tensor] | None:
        """Return the parameters for which moments of whole tensors are kept; None if the stage never keeps such
        moments.
        """
        return None

    def stepped(self, engine: Any, model: ModelMap) -> Iterator[Stepped]:
        held = engine.optimizer
        for group, pair in enumerate(zip(getattr(held, self.flats), getattr(held, self.masters), strict=True)):
            touched = self.whole(held, group)
            numel = None if touched is None else sum(parameter.numel() for parameter in touched)
            tensors = [number for number, tensor in enumerate(model.tensors) if tensor.group == group != FROZEN]
            yield Stepped(BufferId("group", group), group, tensors, *pair, is_empty_group(model, group), numel)

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Return weights as whole tensors at the parameters' own addresses, and masters in DeepSpeed's own order of a
        group.

        Moments of whole tensors are in the order in which DeepSpeed reads them.
        """
        rows = super().census(engine, model)
        for each in self.stepped(engine, model):
            if not each.is_empty:
                rows += _master_rows(each.master, *self.slots(engine.optimizer, model, each.group))
                rows += _whole_rows(engine, model, each.master, self.whole(engine.optimizer, each.group) or ())
        return rows


def is_empty_group(model: ModelMap, group: int) -> bool:
    """Return whether this rank has no tensor of an optimizer group, because its layers are on other pipeline stages."""
    return not any(tensor.numel for tensor in model.tensors if tensor.group == group)


def fill_empty_groups(optimizer: torch.optim.Optimizer, model: ModelMap) -> dict[nn.Parameter, str]:
    """Give each empty group one element that belongs to no tensor: DeepSpeed accepts no group without one.

    The element is stepped with the others (without ZeRO see `stage0.count_empty_groups`), so a group's counts are the
    same on all stages. Returns the names of the elements: DeepSpeed asks for that of every parameter.
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


def numbers_of(model: ModelMap) -> dict[int, int]:
    """Return the number of each parameter's tensor, by the parameter's id."""
    return {id(parameter): number for number, parameter in enumerate(model.parameters)}


def end_to_end(model: ModelMap, parameters: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the slots of parameters that follow one another."""
    number, slots, position = numbers_of(model), [], 0
    for parameter in parameters:
        slots.append((number[id(parameter)], position, parameter.numel()))
        position += parameter.numel()
    return slots


def _master_rows(master: torch.Tensor, low: int, slots: Slots) -> list[Found]:
    """Return rows for the part of a flat group in `master`, which holds the group's positions from `low` on."""
    rows, high = [], low + master.numel()
    for number, position, numel in slots:
        start, stop = max(position, low), min(position + numel, high)
        if start < stop:
            address = master.data_ptr() + (start - low) * master.element_size()
            rows.append(Found(MASTER, number, start - position, stop - start, address))
    return rows


def _whole_rows(engine: Any, model: ModelMap, master: torch.Tensor, parameters: Iterable[torch.Tensor]) -> list[Found]:
    """Return rows for moments of whole tensors.

    Such a moment holds each of `parameters`, of which `master` has a part, one after another.
    """
    state, rows = engine.basic_optimizer.state.get(master, {}), []
    for name in rule_of(engine.basic_optimizer).whole_tensors:
        for number, position, numel in end_to_end(model, parameters) if name in state else ():
            address = state[name].data_ptr() + position * state[name].element_size()
            rows.append(Found(name, number, 0, numel, address))
    return rows
