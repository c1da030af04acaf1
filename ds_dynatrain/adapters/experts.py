"""AutoEP: mixture-of-experts layers of Hugging Face models that DeepSpeed replaces by its own.

The logical model is DeepSpeed's converted form with expert size 1: a layer's experts are the stacks `experts.w1`,
`.w2` and `.w3` of shape (experts, out, in), and the expert axis cuts dim 0. Every rank holds the router and shared
experts whole. DeepSpeed says on each stack which experts a rank holds, and that is what is read here. Its conversion is
run on modules without memory, so nothing full-size is ever made.

How ZeRO deals the stacks is told in `expert_groups`. In the order of a group's flat buffer they are w1, w2, w3 of the
first layer, then of the next. AutoEP takes the experts' initial values from the user's model, so the stacks that
ranks hold at any size are slices of the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.children import adopt, with_memory
from ds_dynatrain.adapters.expert_groups import check_size, enter_layers, expert_index, rename_groups
from ds_dynatrain.adapters.template import Template
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import AxisCuts, Layout, uneven


def is_on(config: Mapping[str, Any]) -> bool:
    """Whether the configuration asks for AutoEP."""
    return bool((config.get("expert_parallel") or {}).get("enabled"))


def start_size(config: Mapping[str, Any]) -> int:
    """The expert size of the configuration."""
    return int(config["expert_parallel"].get("autoep_size", 1))


def configured(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The configuration with the expert size of a layout."""
    return {**config, "expert_parallel": {**config["expert_parallel"], "autoep_size": layout.expert}}


def logical(template: Template, config: dict[str, Any]) -> nn.Module:
    """The model whose parameters are the logical tensors, on the meta device."""
    return convert(template.copy(), config, 1, 0)


def convert(module: nn.Module, config: dict[str, Any], size: int, index: int) -> nn.Module:
    """The module, on the meta device and as the user wrote it, with DeepSpeed's layers for one expert index.

    LayoutError for a size that does not divide the experts of a layer.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_post_detection

    settings = parse_autoep_config({**config["expert_parallel"], "autoep_size": size})
    conversion = AutoEP(module, settings)
    specs = conversion.ep_parser()
    check_size({spec.moe_module_name: spec.num_experts for spec in specs}, size)
    validate_autoep_post_detection(settings, specs)
    with torch.device("meta"):
        conversion.replace_moe_layers(specs, ep_size=size, ep_rank=index)
    for spec in specs:
        _count_from_zero(module.get_submodule(spec.moe_module_name))
    return module


def cuts(template: Template, config: dict[str, Any], layout: Layout) -> dict[str, AxisCuts]:
    """How the expert axis cuts each logical tensor that it cuts, by name.

    UnsupportedError, naming the parameter, for experts that are not dealt in order; LayoutError as `convert`.
    """
    made = convert(template.copy(), config, layout.expert, 0)
    return {
        name: _cut(name, held) for name, held in made.named_parameters() if getattr(held, "allreduce", True) is False
    }


def reshape(root: nn.Module, template: Template, config: dict[str, Any], layout: Layout) -> None:
    """Give `root` the children of this rank: parameters of local shape over memory that is not written yet.

    The world of the layout is installed. Buffers are those of the template.
    """
    dtype = next(root.parameters()).dtype
    made = convert(template.copy(), config, layout.expert, expert_index(layout))
    adopt(root, with_memory(made, dtype))


def enter(engine: Any, layout: Layout) -> None:
    """Set in engine, layers and optimizer groups what belongs to the expert size and to this rank's place.

    The world of the layout is installed. Also for a module that stays: its groups are other ones, and its rank may hold
    other experts than before.
    """
    from deepspeed.module_inject.auto_ep_folding import build_folding_spec

    index = expert_index(layout)
    for part in engine.module.modules():
        if getattr(part, "_is_autoep_layer", False):
            part.ep_rank = index
            for held in part.experts.parameters():
                _place_of(held, index)
    enter_layers(engine)
    rename_groups(engine.basic_optimizer, layout.expert)
    engine._autoep_folding_spec = build_folding_spec(
        world_size=layout.world_size, pp_size=layout.pipe, tp_size=layout.tensor, ep_size=layout.expert, mp_mode="sp"
    )


def _cut(name: str, held: nn.Parameter) -> AxisCuts:
    """Whole experts in order, as DeepSpeed describes them on the parameter."""
    from deepspeed.checkpoint import constants as keys

    placement = getattr(held, keys.DS_AUTOEP_UC_META, {}).get(keys.AUTOEP_EXPERT_PLACEMENT)
    if placement is None:
        raise UnsupportedError(f"{name!r} is an expert parameter that DeepSpeed does not describe; leave AutoEP off")
    ranks = [list(rank[keys.AUTOEP_PLACEMENT_EXPERTS]) for rank in placement[keys.AUTOEP_PLACEMENT_RANKS]]
    if list(chain.from_iterable(ranks)) != list(range(placement[keys.AUTOEP_NUM_EXPERTS])):
        raise UnsupportedError(f"{name!r}: its experts are dealt as {ranks}, not in order; leave AutoEP off")
    return AxisCuts(expert=uneven(0, map(len, ranks)))


def _place_of(held: nn.Parameter, index: int) -> None:
    """Let a parameter's description speak of another expert index."""
    from deepspeed.checkpoint import constants as keys
    from deepspeed.checkpoint.autoep_affine import autoep_experts_for_rank

    description = getattr(held, keys.DS_AUTOEP_UC_META)
    experts = autoep_experts_for_rank(description[keys.AUTOEP_EXPERT_PLACEMENT], index)
    description.update({keys.AUTOEP_PARAM_EP_RANK: index, keys.AUTOEP_PARAM_LOCAL_EXPERTS: list(experts)})


def _count_from_zero(layer: nn.Module) -> None:
    """The layer's own count of tokens, made on the meta device with the rest, is real."""
    for name, buffer in layer.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(layer, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu"))
