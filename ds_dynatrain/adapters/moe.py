"""Native experts: `deepspeed.moe.layer.MoE`, which a user builds into a model.

The logical model is the user's with expert size 1: each expert has parameters of its own, which are named by the
expert's number in the whole layer, `...deepspeed_experts.5.fc.weight`. A rank has the modules of its own experts only
and numbers them from 0. The expert axis does not cut a tensor but says who has it. All experts of a layer are copies
of one module (`Experts` makes them so), which is what a rank's are built from.

How ZeRO deals their tensors is told in `expert_groups`. DeepSpeed has no native experts under stage 3. A layer's
capacity follows from the tokens of a rank, not from the expert size; what drops tokens drops others in another world.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.moe.layer import MoE
from torch import nn

from ds_dynatrain.adapters.children import adopt, with_memory
from ds_dynatrain.adapters.expert_groups import check_size, enter_layers, group_name, rename_groups
from ds_dynatrain.adapters.template import Template
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
        raise UnsupportedError(f"experts of several sizes: {found}; build all layers with one")
    return next(iter(sizes.values()), 1)


def logical(template: Template) -> nn.Module:
    """The model whose parameters are the logical tensors, on the meta device."""
    return convert(template.copy(), 1)


def convert(module: nn.Module, size: int) -> nn.Module:
    """The module, on the meta device, with as many experts as a rank has at an expert size.

    LayoutError for a size that does not divide the experts of a layer.
    """
    found = dict(layers(module))
    check_size({name: layer.num_experts for name, layer in found.items()}, size)
    for name, layer in found.items():
        _resize(name, layer, size)
    return module


def names(module: nn.Module, index: int) -> dict[str, str]:
    """The logical name of each parameter of a rank's module, by its own; index: the rank's, on the expert axis."""
    found = {name: name for name, _ in module.named_parameters()}
    for path, layer in layers(module):
        for local, prefix, held in _experts(path, layer):
            number = index * layer.num_local_experts + local
            found.update(
                {f"{prefix}.{local}.{name}": f"{prefix}.{number}.{name}" for name, _ in held.named_parameters()}
            )
    return found


def cuts(template: Template, layout: Layout) -> dict[str, AxisCuts]:
    """Which expert index has each logical tensor of an expert, by name; LayoutError as `convert`."""
    made = logical(template)
    found = dict(layers(made))
    check_size({name: layer.num_experts for name, layer in found.items()}, layout.expert)
    cut: dict[str, AxisCuts] = {}
    for path, layer in found.items():
        for number, prefix, held in _experts(path, layer):
            holder = AxisCuts(expert=Pick(layout.expert, (number * layout.expert // layer.num_experts,)))
            cut.update({f"{prefix}.{number}.{name}": holder for name, _ in held.named_parameters()})
    return cut


def reshape(root: nn.Module, template: Template, layout: Layout) -> None:
    """Give `root` the children of this rank: parameters over memory that is not written, buffers of the template."""
    dtype = next(root.parameters()).dtype
    adopt(root, with_memory(convert(template.copy(), layout.expert), dtype))


def enter(engine: Any, layout: Layout) -> None:
    """Set in engine, layers and optimizer groups what belongs to the expert size; the world is installed.

    Also for a module that stays: its groups of ranks are other ones.
    """
    enter_layers(engine)
    rename_groups(engine.basic_optimizer, layout.expert)


def _experts(path: str, layer: Any) -> Iterator[tuple[int, str, nn.Module]]:
    """(number here, name of the list that it is in, module) of each expert of a layer."""
    prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts".removeprefix(".")
    return ((number, prefix, held) for number, held in enumerate(layer.deepspeed_moe.experts.deepspeed_experts))


def _resize(path: str, layer: Any, size: int) -> None:
    """Let a layer be one of an expert size: as many experts, and the marks of that size on them."""
    routed = layer.deepspeed_moe
    held = routed.experts
    pattern = _pattern(path, held.deepspeed_experts)
    count, name = layer.num_experts // size, group_name(size)
    held.deepspeed_experts = nn.ModuleList([pattern.copy() for _ in range(count)])
    for parameter in held.deepspeed_experts.parameters():
        parameter.allreduce, parameter.group_name = False, name
    layer.num_local_experts = routed.num_local_experts = held.num_local_experts = count
    layer.ep_size = routed.ep_size = size
    layer.expert_group_name = routed.ep_group_name = name


def _pattern(path: str, experts: nn.ModuleList) -> Template:
    """What all experts of a layer are copies of; UnsupportedError if they have become unlike."""
    kinds = {tuple((name, held.shape, held.requires_grad) for name, held in one.named_parameters()) for one in experts}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"the experts of {path!r} are not alike: parameters, shapes or requires_grad differ between them, and they "
            "could not change places; give all experts of a layer the same"
        )
    return Template.of(experts[0])
