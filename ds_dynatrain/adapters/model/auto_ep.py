"""AutoEP: mixture-of-experts layers of Hugging Face models, which DeepSpeed replaces with its own layers.

The logical model is DeepSpeed's converted form with expert size 1: a layer's experts are the stacks `experts.w1`, `.w2`
and `.w3` of shape (experts, out, in), and the expert axis cuts dim 0. Every rank holds the router and the shared
experts whole. DeepSpeed records on each stack which experts a rank holds, and this package reads these records. The
conversion runs on modules without storage, so no full-size tensor is ever made.

With a map of experts (`Layout.experts`), the expert numbers that a router returns are changed to *places*: positions in
the order in which the experts lie on the ranks. DeepSpeed sends tokens to ranks by these numbers. Everything else, such
as routers' weights and layers' counters, uses the experts' own numbers.

With a tensor axis DeepSpeed *folds* AutoTP's cuts into AutoEP's: attention and other layers that AutoTP knows are cut,
but stacks and routers are not. Tensor ranks divide a layer's tokens among themselves and send them to experts the way
data ranks do. DeepSpeed refuses expert size 1 with a tensor axis, because gradients would be counted twice.

The docstring of `moe` describes how ZeRO partitions the stacks. A group's flat buffer holds w1, w2 and w3 of the first
layer, followed by those of the next layer. AutoEP takes the experts' initial values from the user's model, so the
stacks that ranks hold are slices of the same tensors at any expert size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from deepspeed.utils import groups
from torch import nn

from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.adapters.model.moe import (
    check_size,
    enter_layers,
    expert_index,
    group_name,
    layers_with_experts,
)
from ds_dynatrain.adapters.model.shaper import Cuts
from ds_dynatrain.errors import ConfigError, LayoutError, UnsupportedError
from ds_dynatrain.space import AxisCuts, Dealt, Layout
from ds_dynatrain.support.checks import setting
from ds_dynatrain.support.row import Config


def is_on(config: Config) -> bool:
    """Return whether the configuration turns AutoEP on."""
    return bool(setting(config, "expert_parallel.enabled"))


def start_size(config: Config) -> int:
    """Return the expert size that the configuration gives AutoEP; 1 if it gives none."""
    return int(config["expert_parallel"].get("autoep_size", 1))


class Conversion:
    """AutoEP's conversion of a model: it replaces layers that have experts, and distributes the experts over ranks."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        """Check that AutoEP can convert a model, and keep its settings.

        Raises UnsupportedError if the model is not whole, and ConfigError if DeepSpeed refuses the configuration.
        """
        for name, held in model.named_parameters():
            if hasattr(held, "ds_id") or held.is_meta:
                where = "cut by deepspeed.zero.Init" if hasattr(held, "ds_id") else "on the meta device"
                raise UnsupportedError(
                    f"AutoEP (expert_parallel) needs whole parameters, and {name!r} is {where}; build the model "
                    "outside of deepspeed.zero.Init, on a real device"
                )
        self._block, self._config = dict(config["expert_parallel"]), config
        self._expert_cuts: dict[int, Cuts] = {}
        self._replaced: Any = None
        with refused_by_deepspeed():
            validate(config, Layout(data=start_size(config), expert=start_size(config), zero_stage=0))

    def take_replaced(self) -> Any:
        """Return AutoEP's record of which parameters replaced which, and delete it. Called by DeepSpeed's engine."""
        replaced, self._replaced = self._replaced, None
        return replaced

    def expert_cuts(self, layout: Layout) -> Cuts:
        """Return a map from each tensor's name to its cut by the expert axis.

        Raises the errors of `Shaper.cuts`.
        """
        cuts = self._cuts_in_order(layout.expert)
        if layout.experts is None:
            return cuts
        placed = {layer: AxisCuts(expert=Dealt(rows)) for layer, rows in self.rows(layout).items()}
        return {name: placed[_layer_of(name)] if cut.expert else cut for name, cut in cuts.items()}

    def rows(self, layout: Layout) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the experts of each index of the expert axis, keyed by layer.

        Raises LayoutError if the layout's map of experts does not fit the layers.
        """
        cuts = self._cuts_in_order(layout.expert)
        layers = {_layer_of(name): cut.expert.rows for name, cut in cuts.items() if isinstance(cut.expert, Dealt)}
        if layout.experts is None:
            return layers
        if len(layers) != len(layout.experts):
            raise LayoutError(
                f"the map of experts is for {len(layout.experts)} layers, and {len(layers)} layers have experts: "
                f"{', '.join(layers)}; give lists for each of them, in this order"
            )
        for (layer, rows), given in zip(layers.items(), layout.experts, strict=True):
            told, count = (sum(map(len, each)) for each in (given, rows))
            if told != count:
                raise LayoutError(
                    f"the map of experts names {told} experts of {layer!r}, which has {count}; name 0 to {count - 1}"
                )
        return dict(zip(layers, layout.experts, strict=True))

    def _cuts_in_order(self, size: int) -> Cuts:
        if size not in self._expert_cuts:
            self._expert_cuts[size] = cuts_of(self.dealt(size, 0))
        return self._expert_cuts[size]

    def enter_layers(self, engine: Any, layout: Layout) -> None:
        """Give layers with experts the current process groups and this rank's experts, even in an unchanged module."""
        index, rows = expert_index(layout), self.rows(layout)
        for name, part in engine.module.named_modules():
            if getattr(part, "_is_autoep_layer", False):
                take_place(part, rows[name], index)
        enter_layers(engine, layout.expert)
        _fold(engine, layout)

    def dealt(self, size: int, index: int) -> nn.Module:
        """Return the model, on the meta device, with only the experts at one index of the expert axis."""
        raise NotImplementedError


@contextmanager
def refused_by_deepspeed() -> Iterator[None]:
    """Context manager that turns an error of DeepSpeed's own checks of `expert_parallel` into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"expert_parallel: {error}; change the key that this names, or set expert_parallel.enabled to false"
        ) from error


def replace_layers(
    module: nn.Module,
    block: Mapping[str, Any],
    size: int,
    index: int,
    listed: bool = False,
    each: Callable[[nn.Module], None] | None = None,
) -> Any:
    """Replace layers of a module, on the meta device or real, with DeepSpeed's layers for one expert index.

    block: `expert_parallel` of the configuration.
    size, index: the expert size, and the expert index.
    listed: whether to return which parameters replace which.
    each: function that is called with each new layer before the next one is made.

    Raises LayoutError if the size does not divide the experts of a layer, and ValueError if DeepSpeed refuses the
    settings.
    """
    from deepspeed.module_inject.auto_ep_config import validate_autoep_post_detection

    conversion, specs = _detected(module, block, size)
    check_size({spec.moe_module_name: spec.num_experts for spec in specs}, size)
    validate_autoep_post_detection(conversion.config, specs)
    device = next(module.parameters()).device
    with torch.device(device):
        given: dict[str, Any] = {"collect_sources": listed, "on_moe_layer_replaced": each}
        replaced = conversion.replace_moe_layers(specs, ep_size=size, ep_rank=index, **given)
    for spec in specs:
        layer = module.get_submodule(spec.moe_module_name)
        for name, buffer in layer.named_buffers(recurse=False):
            if buffer.is_meta:  # a count of tokens, which begins at zero
                setattr(layer, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=compute_device()))
    return replaced


def _detected(module: nn.Module, block: Mapping[str, Any], size: int) -> tuple[Any, list[Any]]:
    """Return DeepSpeed's conversion of a module that is not converted yet, and the layers that it has detected."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    conversion = AutoEP(module, parse_autoep_config({**block, "autoep_size": size}))
    return conversion, conversion.ep_parser()


class UserTensor(NamedTuple):
    """A tensor of the model as the user built it, and the parts of converted tensors of which it consists.

    Each part is (name of a converted tensor, its elements [start, stop), the position of the first of them in the
    user's tensor).
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int, int, int], ...]


def user_tensors(module: nn.Module, block: Mapping[str, Any]) -> list[UserTensor]:
    """Return the tensors of a model on the meta device that AutoEP replaces.

    Raises UnsupportedError for experts whose tensors AutoEP transposes.
    """
    found = []
    for spec in _detected(module, block, 1)[1]:
        path, layer = spec.moe_module_name, module.get_submodule(spec.moe_module_name)
        renamed = {"router.gate": spec.router_name, "shared_experts": spec.shared_experts_name}
        renamed["shared_experts_gate"] = spec.shared_experts_gate_name
        for new, old in renamed.items():
            for name, held in layer.get_submodule(old).named_parameters() if old and hasattr(layer, old) else ():
                whole = (f"{path}.{new}.{name}", 0, held.numel(), 0)
                found.append(UserTensor(f"{path}.{old}.{name}", tuple(held.shape), (whole,)))
        found += _user_experts(f"{path}.{spec.experts_name}", layer.get_submodule(spec.experts_name), path, spec)
    return found


def _user_experts(name: str, held: nn.Module, path: str, spec: Any) -> Iterator[UserTensor]:
    """Yield the user's tensors of a layer's experts: separate ones for each expert, or stacks of all experts."""
    up, down = (spec.ffn_hidden_size, spec.hidden_size), (spec.hidden_size, spec.ffn_hidden_size)
    size = spec.ffn_hidden_size * spec.hidden_size
    stacks = {spec.expert_w1_name: ("w1", up), spec.expert_w2_name: ("w2", down), spec.expert_w3_name: ("w3", up)}
    stacks.pop(None, None)
    for own, (stack, shape) in stacks.items():
        new = f"{path}.experts.{stack}"
        if spec.expert_storage == "module_list":
            for expert in range(spec.num_experts):
                part = (new, expert * size, (expert + 1) * size, 0)
                yield UserTensor(f"{name}.{expert}.{own}.weight", shape, (part,))
            continue
        fused = stack == "w1" and spec.expert_w3_name is None
        stacked = (spec.num_experts, shape[0] * (1 + fused), shape[1])
        if tuple(getattr(held, own).shape) != stacked:
            raise UnsupportedError(f"AutoEP transposes {name}.{own}; give names= for the model's converted tensors")
        beside = [new, f"{path}.experts.w3"] if fused else [new]
        parts = [
            (each, expert * size, (expert + 1) * size, (expert * len(beside) + place) * size)
            for expert in range(spec.num_experts)
            for place, each in enumerate(beside)
        ]
        yield UserTensor(f"{name}.{own}", stacked, tuple(parts))


class ToPlaces:
    """Router hook that replaces the number of each chosen expert with the expert's position on the ranks.

    A layer counts tokens by the numbers that its router returns. The hook corrects the count, so that it is again a
    count per expert.
    """

    def __init__(self, layer: Any, experts: Sequence[int]) -> None:
        """Create the hook of a layer whose experts lie on the ranks in the given order."""
        self._layer = layer
        self._experts = torch.tensor(experts, device=layer.tokens_per_expert.device)
        self._places = self._experts.argsort()

    def __call__(self, router: nn.Module, given: Any, found: Any) -> Any:
        """Return the router's output, with the number of each chosen expert replaced by its position on the ranks."""
        scores, chosen, counts = found
        by_place = counts[self._experts]
        with torch.no_grad():
            self._layer.tokens_per_expert.add_(counts - by_place)
        return scores, self._places[chosen], by_place


def take_place(layer: Any, rows: tuple[tuple[int, ...], ...], index: int) -> None:
    """Assign a layer of AutoEP the experts of one expert index.

    Sets DeepSpeed's records of the layer's experts, and the order in which the layer sends tokens to experts.

    rows: the experts of each expert index.
    index: the expert index.
    """
    from deepspeed.checkpoint import constants as keys
    from deepspeed.checkpoint.autoep_affine import autoep_placement_to_affine_map, make_autoep_placement_descriptor

    layer.ep_rank, placement = index, make_autoep_placement_descriptor(layer.num_experts, rows)
    layer.expert_placement_descriptor = placement
    for held in layer.experts.parameters():
        description = getattr(held, keys.DS_AUTOEP_UC_META)
        if description[keys.AUTOEP_EXPERT_PLACEMENT] != placement:
            shape = description[keys.AUTOEP_PARAM_LOGICAL_SHAPE]
            description[keys.AFFINE_MAP] = autoep_placement_to_affine_map(placement, shape).to_dict()
        description[keys.AUTOEP_EXPERT_PLACEMENT] = placement
        description.update({keys.AUTOEP_PARAM_EP_RANK: index, keys.AUTOEP_PARAM_LOCAL_EXPERTS: list(rows[index])})
    hooks, order = layer.router._forward_hooks, list(chain.from_iterable(rows))
    for key in [key for key, hook in hooks.items() if isinstance(hook, ToPlaces)]:
        del hooks[key]
    if order != list(range(len(order))):
        layer.router.register_forward_hook(ToPlaces(layer, order), prepend=True)


def cuts_of(module: nn.Module) -> Cuts:
    """Return a map from the name of each tensor of a converted module to its cuts.

    DeepSpeed's record of which rank holds which experts becomes a cut into whole experts.
    """
    from deepspeed.checkpoint import constants as keys

    found = {}
    for name, held in module.named_parameters():
        found[name] = AxisCuts()
        if getattr(held, "allreduce", True):
            continue
        placement = getattr(held, keys.DS_AUTOEP_UC_META, {}).get(keys.AUTOEP_EXPERT_PLACEMENT)
        if placement is None:
            raise UnsupportedError(
                f"{name!r} is an expert parameter that DeepSpeed does not describe; set expert_parallel.enabled to "
                "false"
            )
        ranks = placement[keys.AUTOEP_PLACEMENT_RANKS]
        found[name] = AxisCuts(expert=Dealt(tuple(tuple(rank[keys.AUTOEP_PLACEMENT_EXPERTS]) for rank in ranks)))
    return found


def validate(config: Config, layout: Layout) -> None:
    """Raise DeepSpeed's ValueError if DeepSpeed cannot train this layout with AutoEP under this configuration."""
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config

    validate_autoep_config(
        parse_autoep_config({**config["expert_parallel"], "autoep_size": layout.expert}),
        world_size=layout.world_size,
        pp_size=layout.pipe,
        tp_size=layout.tensor,
        sp_size=1,
        zero_stage=layout.zero_stage,
        tp_preset_model=setting(config, "tensor_parallel.preset_model"),
        zero_offload_optimizer=bool(setting(config, "zero_optimization.offload_optimizer")),
        zero_offload_param=bool(setting(config, "zero_optimization.offload_param")),
    )


def _fold(engine: Any, layout: Layout) -> None:
    """Record in the engine how tensor and expert ranks are arranged, and give layers their groups if there is a tensor
    axis.
    """
    from deepspeed.module_inject.auto_ep_folding import FoldingGroupHandles, build_folding_spec, local_folding_ranks

    spec = build_folding_spec(
        world_size=layout.world_size,
        pp_size=layout.pipe,
        tp_size=layout.tensor,
        ep_size=layout.expert,
        mp_mode="tp" if layout.tensor > 1 else "sp",
    )
    engine._autoep_folding_spec, engine._autoep_folding_group_handles = spec, None
    if layout.tensor == 1:
        return
    name = group_name(layout.expert)
    found = {
        "tp": groups.get_tensor_model_parallel_group(),
        "dense_dp": groups._get_data_parallel_group(),
        "ep": groups._get_expert_parallel_group(name),
        "edp": groups._get_expert_data_parallel_group(name),
    }
    ranks = local_folding_ranks(engine.global_rank, spec)
    given: dict[str, Any] = {f"{kind}_group": group for kind, group in found.items()}
    given |= {f"{kind}_ranks": ranks[kind] for kind in found}
    handles = FoldingGroupHandles(spec=spec, ep_group_name=name, **given)
    engine._autoep_folding_group_handles = handles
    for part in layers_with_experts(engine.module):
        part.set_deepspeed_parallelism(False, handles)


def _layer_of(name: str) -> str:
    """Return the name of the layer to which a stack of experts belongs."""
    return name.rpartition(".experts.")[0]
