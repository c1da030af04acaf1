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
from ds_dynatrain.adapters.expert_groups import check_size, enter_layers, expert_index, leave_groups, refuse_other_axes
from ds_dynatrain.adapters.template import ModelFactory, Template
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.space import AxisCuts, Layout, uneven


def is_on(config: Mapping[str, Any]) -> bool:
    """Whether the configuration asks for AutoEP."""
    return bool((config.get("expert_parallel") or {}).get("enabled"))


def start_size(config: Mapping[str, Any]) -> int:
    """The expert size of the configuration."""
    return int(config["expert_parallel"].get("autoep_size", 1))


class AutoEPShaper:
    """A model whose layers with experts are AutoEP's."""

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        listed: bool = False,
        factory: ModelFactory | None = None,
    ) -> None:
        """Take a user's model over: it has DeepSpeed's layers from now on, with all experts, and its values.

        listed: whether the caller has lists of its parameters, in an optimizer say, that must be told of new ones.
        UnsupportedError, naming the parameter, for one that is not whole; ConfigError for what DeepSpeed refuses.
        """
        from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config

        _refuse_parts(model)
        self._block = dict(config["expert_parallel"])
        size = start_size(config)
        try:
            validate_autoep_config(parse_autoep_config(self._block), world_size=size, pp_size=1, tp_size=1, sp_size=1)
        except ValueError as error:
            raise ConfigError(f"expert_parallel: {error}") from error
        self._template = Template.of(model, factory)
        self._cuts: dict[int, dict[str, AxisCuts]] = {}
        self._replaced: Any = _convert(model, self._block, 1, 0, listed)

    def take_replaced(self) -> Any:
        """What DeepSpeed's engine asks its conversion for: which parameters replace which, once."""
        replaced, self._replaced = self._replaced, None
        return replaced

    def cuts(self, layout: Layout) -> Mapping[str, AxisCuts]:
        """Stacks by whole experts, the rest not at all.

        LayoutError for a size that does not divide the experts of a layer; UnsupportedError, naming the parameter, for
        experts that are not dealt in order.
        """
        refuse_other_axes(layout)
        if layout.expert not in self._cuts:
            made = convert(self._template.copy(), self._block, layout.expert, 0)
            self._cuts[layout.expert] = {name: _cut(name, held) for name, held in made.named_parameters()}
        return self._cuts[layout.expert]

    def reshape(self, root: nn.Module, layout: Layout) -> None:
        """New parameters have memory that is not written yet; buffers are those of the template."""
        dtype = next(root.parameters()).dtype
        made = convert(self._template.copy(), self._block, layout.expert, expert_index(layout))
        adopt(root, with_memory(made, dtype))

    def parameters(self, root: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
        """A stack has one name at any size."""
        return dict(root.named_parameters())

    def enter(self, engine: Any, layout: Layout) -> None:
        """The layers' groups and this rank's place among experts, also in a module that stays."""
        from deepspeed.module_inject.auto_ep_folding import build_folding_spec

        index = expert_index(layout)
        for part in engine.module.modules():
            if getattr(part, "_is_autoep_layer", False):
                part.ep_rank = index
                for held in part.experts.parameters():
                    _place_of(held, index)
        enter_layers(engine, layout.expert)
        engine._autoep_folding_spec = build_folding_spec(
            world_size=layout.world_size, pp_size=1, tp_size=1, ep_size=layout.expert, mp_mode="sp"
        )

    def leave(self, engine: Any) -> None:
        """Layers hold no group of the world."""
        leave_groups(engine.module)

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """The size that DeepSpeed reads."""
        config["expert_parallel"]["autoep_size"] = layout.expert


def convert(module: nn.Module, block: Mapping[str, Any], size: int, index: int) -> nn.Module:
    """The module, on the meta device and as the user wrote it, with DeepSpeed's layers for one expert index.

    block: `expert_parallel` of the configuration. LayoutError for a size that does not divide the experts of a layer.
    """
    _convert(module, block, size, index)
    return module


def _convert(module: nn.Module, block: Mapping[str, Any], size: int, index: int, listed: bool = False) -> Any:
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_post_detection

    settings = parse_autoep_config({**block, "autoep_size": size})
    conversion = AutoEP(module, settings)
    specs = conversion.ep_parser()
    check_size({spec.moe_module_name: spec.num_experts for spec in specs}, size)
    validate_autoep_post_detection(settings, specs)
    device = next(module.parameters()).device
    with torch.device(device):
        replaced = conversion.replace_moe_layers(specs, ep_size=size, ep_rank=index, collect_sources=listed)
    for spec in specs:
        _count_from_zero(module.get_submodule(spec.moe_module_name))
    return replaced


def _cut(name: str, held: nn.Parameter) -> AxisCuts:
    """Whole experts in order, as DeepSpeed describes them on the parameter."""
    if getattr(held, "allreduce", True):
        return AxisCuts()
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


def _refuse_parts(model: nn.Module) -> None:
    for name, held in model.named_parameters():
        if hasattr(held, "ds_id") or held.is_meta:
            where = "cut by deepspeed.zero.Init" if hasattr(held, "ds_id") else "on the meta device"
            raise UnsupportedError(f"AutoEP and {name!r}, which is {where}: build the model whole")
