"""Native experts: `deepspeed.moe.layer.MoE`, which a user builds into a model.

The logical model is the user's with expert size 1: each expert has parameters of its own, which are named by the
expert's number in the whole layer, `...deepspeed_experts.5.fc.weight`. A rank has the modules of its own experts only
and numbers them from 0. The expert axis does not cut a tensor but says who has it. All experts of a layer are copies
of one module (`Experts` makes them so), which is what a rank's are built from.

How ZeRO deals their tensors is told in `expert_groups`. DeepSpeed has no native experts under stage 3. A layer's
capacity follows from the tokens of a rank, not from the expert size; what drops tokens drops others in another world.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as td
from deepspeed.moe.layer import MoE
from torch import nn

from ds_dynatrain.adapters.children import Made, adopt, with_memory, without_memory
from ds_dynatrain.adapters.expert_groups import (
    check_size,
    enter_layers,
    expert_index,
    group_name,
    leave_groups,
    refuse_other_axes,
)
from ds_dynatrain.adapters.shaper import Shaper
from ds_dynatrain.adapters.template import ModelFactory, Template
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import AxisCuts, Layout, Pick


def layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with native experts, by name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, MoE))


def start_size(model: nn.Module) -> int:
    """The expert size that the user built the model with; UnsupportedError for layers of several sizes."""
    sizes = {name: int(layer.ep_size) for name, layer in layers(model)}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name!r} has ep_size={size}" for name, size in sizes.items())
        raise UnsupportedError(f"experts of several sizes: {found}; build all layers of deepspeed.moe with one ep_size")
    return next(iter(sizes.values()), 1)


def dropping(module: nn.Module) -> str | None:
    """The first layer whose ranks must have equal numbers of tokens: its capacity, which drops some, follows from them.

    DeepSpeed exchanges buffers of that capacity: ranks with different ones die in the exchange.
    """
    return next((name for name, layer in layers(module) if layer.deepspeed_moe.gate.drop_tokens), None)


class NativeShaper(Shaper):
    """A model with native experts. owners: see `complete`."""

    def __init__(
        self,
        model: nn.Module,
        member: int,
        lists: Sequence[list[nn.Parameter]] = (),
        factory: ModelFactory | None = None,
    ) -> None:
        """Take a user's model over; see `complete`."""
        self._template = Template.of(model, factory)
        self._cuts: dict[int, dict[str, AxisCuts]] = {}
        self.owners = complete(model, member, lists)

    def cuts(self, layout: Layout) -> Mapping[str, AxisCuts]:
        """Which expert index has each tensor of an expert; LayoutError as `convert`."""
        refuse_other_axes(layout)
        if layout.expert not in self._cuts:
            self._cuts[layout.expert] = cuts_of(convert(self._template.copy(), 1), layout.expert)
        return self._cuts[layout.expert]

    def make(self, layout: Layout, rank: int) -> Made:
        """The template's children, with as many experts as a rank has."""
        return Made(convert(self._template.copy(), layout.expert))

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """New parameters have memory that is not written yet; buffers are those of the template."""
        made = made or self.make(layout, td.get_rank())
        adopt(root, with_memory(made.module, next(root.parameters()).dtype))

    def parameters(self, root: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
        """By the numbers of experts in the whole layer."""
        named = names(root, expert_index(layout))
        return {named[name]: held for name, held in root.named_parameters()}

    def enter(self, engine: Any, layout: Layout) -> None:
        """The layers' groups of ranks, also in a module that stays."""
        enter_layers(engine, layout.expert)

    def leave(self, engine: Any) -> None:
        """Layers hold no group of the world."""
        leave_groups(engine.module)


def complete(model: nn.Module, member: int, lists: Sequence[list[nn.Parameter]] = ()) -> dict[int, int]:
    """Give a user's model all experts of its layers, those of other ranks without memory.

    member: of the launch. lists: of parameters that the caller has, an optimizer's say; they get those of all experts.
    UnsupportedError for layers of several sizes, or with experts that are not alike.

    Returns which process of the launch has the first value of each expert's parameter, by the parameter's id, where a
    process has built only the experts of its own rank; nothing where every process has built all of them.
    """
    size, owners = start_size(model), dict[int, int]()
    for path, layer in layers(model):
        held = layer.deepspeed_moe.experts
        pattern, mine, whole = _pattern(path, held.deepspeed_experts), list(held.deepspeed_experts), []
        for number in range(layer.num_experts):
            index, local = divmod(number, len(mine))
            whole.append(mine[local] if index == member % size else without_memory(pattern.copy()))
            if size > 1:
                owners.update(dict.fromkeys(map(id, whole[-1].parameters()), index))
        held.deepspeed_experts = nn.ModuleList(whole)
        _mark(layer, 1)
    if size > 1:
        _complete_lists(model, lists)
    return owners


def convert(module: nn.Module, size: int) -> nn.Module:
    """The module, on the meta device, with as many experts as a rank has at an expert size.

    LayoutError for a size that does not divide the experts of a layer.
    """
    check_size({name: layer.num_experts for name, layer in layers(module)}, size)
    resize(module, size)
    return module


def resize(module: nn.Module, size: int) -> None:
    """Give layers on the meta device as many experts as a rank has at a size, which divides theirs.

    A module without experts, such as a stage of a pipeline may be, stays as it is.
    """
    for path, layer in layers(module):
        held, count = layer.deepspeed_moe.experts, layer.num_experts // size
        pattern, there = _pattern(path, held.deepspeed_experts), list(held.deepspeed_experts)[:count]
        held.deepspeed_experts = nn.ModuleList([*there, *(pattern.copy() for _ in range(count - len(there)))])
        _mark(layer, size)


def names(module: nn.Module, index: int) -> dict[str, str]:
    """The logical name of each parameter of a rank's module, by its own; index: the rank's, on the expert axis."""
    found = {name: name for name, _ in module.named_parameters()}
    for path, layer in layers(module):
        for local, prefix, held in _experts(path, layer):
            number = index * layer.num_local_experts + local
            of_expert = [name for name, _ in held.named_parameters()]
            found.update({f"{prefix}.{local}.{name}": f"{prefix}.{number}.{name}" for name in of_expert})
    return found


def _complete_lists(model: nn.Module, lists: Sequence[list[nn.Parameter]]) -> None:
    """Put the same parameters of all experts of a layer where those of some of them are."""
    alike: dict[str, list[nn.Parameter]] = {}
    for path, layer in layers(model):
        for _, prefix, held in _experts(path, layer):
            for name, parameter in held.named_parameters():
                alike.setdefault(f"{prefix} {name}", []).append(parameter)
    place = {id(parameter): key for key, held in alike.items() for parameter in held}
    taken: dict[str, int] = {}
    for number, listed in enumerate(lists):
        keys = {place[id(parameter)] for parameter in listed if id(parameter) in place}
        for key in keys:
            if taken.setdefault(key, number) != number:
                raise UnsupportedError(
                    f"experts of one layer are in several optimizer groups: {key!r}; put all parameters of its "
                    "experts in one group"
                )
        order = [parameter for parameter in model.parameters() if place.get(id(parameter)) in keys]
        first = next((at for at, parameter in enumerate(listed) if id(parameter) in place), 0)
        others = [
            [parameter for parameter in part if id(parameter) not in place] for part in (listed[:first], listed[first:])
        ]
        listed[:] = [*others[0], *order, *others[1]]


def cuts_of(whole: nn.Module, size: int) -> dict[str, AxisCuts]:
    """The cuts of the tensors of a module with all experts, by name; LayoutError as `convert`."""
    found = dict(layers(whole))
    check_size({name: layer.num_experts for name, layer in found.items()}, size)
    cuts = {name: AxisCuts() for name, _ in whole.named_parameters()}
    for path, layer in found.items():
        for number, prefix, held in _experts(path, layer):
            holder = AxisCuts(expert=Pick(size, (number * size // layer.num_experts,)))
            cuts.update({f"{prefix}.{number}.{name}": holder for name, _ in held.named_parameters()})
    return cuts


def _experts(path: str, layer: Any) -> Iterator[tuple[int, str, nn.Module]]:
    """(number here, name of the list that it is in, module) of each expert of a layer."""
    prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts".removeprefix(".")
    return ((number, prefix, held) for number, held in enumerate(layer.deepspeed_moe.experts.deepspeed_experts))


def _mark(layer: Any, size: int) -> None:
    """Everything that DeepSpeed's constructors note about the expert size."""
    routed = layer.deepspeed_moe
    held, name = routed.experts, group_name(size)
    for parameter in held.deepspeed_experts.parameters():
        parameter.allreduce, parameter.group_name = False, name
    layer.num_local_experts = routed.num_local_experts = held.num_local_experts = layer.num_experts // size
    layer.ep_size = routed.ep_size = size
    layer.expert_group_name = routed.ep_group_name = name


def _pattern(path: str, experts: nn.ModuleList) -> Template:
    """What all experts of a layer are copies of; UnsupportedError if they have become unlike, or hold buffers."""
    if next(experts.buffers(), None) is not None:
        raise UnsupportedError(
            f"the experts of {path!r} have buffers, which would not move with them; make them parameters with "
            "requires_grad=False, or keep them outside of the experts"
        )
    kinds = {tuple((name, held.shape, held.requires_grad) for name, held in one.named_parameters()) for one in experts}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"the experts of {path!r} are not alike: parameters, shapes or requires_grad differ between them, and they "
            "could not change places; give all experts of a layer the same"
        )
    return Template.of(experts[0])
