"""`PipelineModule`: the assignment of layers to stages under a layout, and a module with the layers of another stage.

DeepSpeed names parameters by the number of their layer in the whole model, or by the key of a tied layer, whatever the
number of stages. The logical tensors are therefore those of the module with one stage. A `PipelineTemplate` keeps the
module's layers without storage, and the module makes its stage's layers from them.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from torch import nn

from ds_dynatrain.adapters.model.moe import layers_with_experts
from ds_dynatrain.adapters.model.shaper import copied, template_of
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import Layout

PARAMETERS, UNIFORM, TYPE, PROFILE = "parameters", "uniform", "type:", "profile"
"""DeepSpeed's partition methods.

"type:" is followed by a pattern for the names of layer classes. "profile" takes no argument here.
"""
Stages = tuple[int, ...]
"""Numbers of stages, or the boundaries between stages."""
Cut = Callable[[int, int], Stages]
"""Function (number of layers, number of stages) that returns the boundaries of the stages."""


def is_pipeline(model: nn.Module) -> bool:
    """Return whether DeepSpeed would give the model a pipeline engine."""
    return isinstance(model, PipelineModule)


@dataclass(frozen=True, eq=False)
class PipelineTemplate:
    """The layers of a `PipelineModule` before it is cut into stages, without storage.

    layers: the template of each layer; None for a function.
    keys: the key of each tied layer; None for other layers.
    names: the name of each layer in the partition method.
    tied: a map from the key of each tied layer to the attributes whose gradients DeepSpeed adds up over stages.
    method: the partition method.
    parts: the boundaries with which the module was built. They are reused for the same number of stages, unless the
        method is "profile".
    cut: the function that partitions the layers for the method "profile".
    counts_all: whether a partition by parameters counts all experts, rather than those of one rank.
    """

    layers: tuple[nn.Module | None, ...]
    keys: tuple[str | None, ...]
    names: tuple[str | None, ...]
    tied: Mapping[str, tuple[str, ...]]
    method: str = PARAMETERS
    parts: Stages = ()
    cut: Cut | None = None
    counts_all: bool = False

    @staticmethod
    def of(model: PipelineModule, method: str = PARAMETERS, cut: Cut | None = None) -> PipelineTemplate:
        """Return the template of a module that has all layers. From now on the module builds its layers from the
        template.

        method, cut: see the fields of the class.

        Raises UnsupportedError, naming the part, if the module cannot be cut into stages in more than one way.
        """
        refuse_uncuttable(model)
        refuse_shared(model)
        specs: Sequence[Any] = model._layer_specs
        built = [_built(model, number, spec) for number, spec in enumerate(specs)]
        kept = {id(module): template_of(module) for module in built if module is not None}
        template = PipelineTemplate(
            tuple(None if module is None else kept[id(module)] for module in built),
            tuple(spec.key if isinstance(spec, TiedLayerSpec) else None for spec in specs),
            tuple(map(_name, specs)),
            {key: tuple(attributes) for key, attributes in model.tied_weight_attrs.items()},
            method.lower(),
            tuple(map(int, model.parts)),
            cut,
        )
        model._layer_specs = [
            spec if layer is None else with_builder(spec, partial(copied, layer))
            for spec, layer in zip(specs, template.layers, strict=True)
        ]
        return template

    def boundaries(self, layout: Layout) -> Stages:
        """Return the first layer of each stage in DeepSpeed's partition, followed by the number of all layers.

        Raises LayoutError if a stage would have no layer.
        """
        count, found = len(self.layers), layout.boundaries
        if found is not None and found[-1] != count:
            raise LayoutError(
                f"boundaries={found} end with layer {found[-1]}, and the model has {count} layers; give boundaries "
                f"that end with {count}"
            )
        if layout.pipe > count:
            raise LayoutError(
                f"pipe={layout.pipe} stages share {count} layers, and each needs one; nearest: pipe={count}"
            )
        if found is not None:
            return found
        if self.method == PROFILE and self.cut is not None:
            return self.cut(count, layout.pipe)
        if layout.pipe == len(self.parts) - 1:
            return self.parts
        if self.method == UNIFORM:
            parts = partition_uniform(num_items=count, num_parts=layout.pipe)
        else:
            parts = partition_balanced(weights=self._weights(layout.expert), num_parts=layout.pipe)
        return tuple(map(int, parts))

    def stages(self, layout: Layout) -> dict[str, Stages]:
        """Return a map from each logical tensor's name to the stages that hold it, ascending; several for tied tensors.

        Raises UnsupportedError, naming the tensor, if a tensor that is not tied would be on several stages.
        """
        holders = self._holders(layout)
        found: dict[str, Stages] = {}
        for layer, key, prefix in zip(self.layers, self.keys, self.prefixes(), strict=True):
            held = holders[prefix]
            for name, parameter in () if layer is None else layer.named_parameters():
                is_tied = key is None or name in self.tied[key] or not parameter.requires_grad
                if len(held) > 1 and not is_tied:
                    raise UnsupportedError(
                        f"{prefix}.{name} is on stages {', '.join(map(str, held))} and not in `tied_weight_attr`: each "
                        "of them would train a copy of its own; put it into a layer of its own"
                    )
                found[f"{prefix}.{name}"] = held
        return found

    def prefixes(self) -> tuple[str, ...]:
        """Return, for each layer, the prefix of the names under which its parameters are registered."""
        return tuple(str(at) if key is None else f"tied_modules.{key}" for at, key in enumerate(self.keys))

    def ties(self, layout: Layout) -> dict[str, Stages]:
        """Return a map from the key of each tied layer to the stages that share it, the owner first."""
        holders = self._holders(layout)
        return {key: holders[f"tied_modules.{key}"] for key in sorted(self.tied)}

    def layers_by_stage(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        """Return the names of the modules on each stage, without functions. A tied module appears on each of its
        stages.
        """
        names = [None if layer is None else name for layer, name in zip(self.layers, self.prefixes(), strict=True)]
        pairs = itertools.pairwise(self.boundaries(layout))
        return tuple(tuple(dict.fromkeys(filter(None, names[start:stop]))) for start, stop in pairs)

    @property
    def whole(self) -> nn.Module:
        """A module that contains all layers under DeepSpeed's names, without storage."""
        made, tied = nn.Module(), nn.ModuleDict()
        for layer, key, prefix in zip(self.layers, self.keys, self.prefixes(), strict=True):
            if layer is not None:
                (made if key is None else tied).add_module(key or prefix, layer)
        made.add_module("tied_modules", tied)
        return made

    def converted(self, convert: Callable[[nn.Module], None]) -> PipelineTemplate:
        """Return a template with the same stages but other layers.

        convert: function that alters copies of all layers, in a module like `whole`.
        """
        copies = {id(layer): copied(layer) for layer in self.layers if layer is not None}
        made = replace(self, layers=tuple(None if each is None else copies[id(each)] for each in self.layers)).whole
        convert(made)
        found = (None if each is None else self.layer_in(made, at) for at, each in enumerate(self.layers))
        return replace(self, layers=tuple(found), counts_all=True)

    def layer_in(self, whole: nn.Module, number: int) -> nn.Module:
        """Return one layer from a module like `whole`. The layer must not be a function."""
        return whole.get_submodule(self.prefixes()[number])

    def _holders(self, layout: Layout) -> dict[str, Stages]:
        """Return a map from each layer's prefix to the stages that have the layer, in ascending order."""
        found: dict[str, Stages] = {}
        for stage, (start, stop) in enumerate(itertools.pairwise(self.boundaries(layout))):
            for prefix in dict.fromkeys(self.prefixes()[start:stop]):
                found[prefix] = (*found.get(prefix, ()), stage)
        return found

    def _weights(self, expert: int) -> list[int]:
        """Return the weight that the partition method gives each layer when it balances the stages.

        expert: the number of ranks over which the experts of a layer are divided.
        """
        if self.method == PARAMETERS:
            expert = 1 if self.counts_all else expert
            return [_trained(layer, expert) for layer in self.layers]
        if not self.method.startswith(TYPE):
            raise LayoutError(
                f"no partition method {self.method!r}; give PipelineModule(partition_method=...) {PARAMETERS!r}, "
                f"{UNIFORM!r} or '{TYPE}CLASS'"
            )
        pattern = re.compile(self.method.split(":")[1], re.IGNORECASE)
        weights = [int(name is not None and pattern.search(name) is not None) for name in self.names]
        if not any(weights):
            raise LayoutError(
                f"partition method {self.method!r}: none of the {len(self.names)} layers is of a class with such a "
                f"name; name the class of a layer, or give PipelineModule(partition_method={UNIFORM!r})"
            )
        return weights


def with_builder(spec: Any, build: Callable[[], nn.Module]) -> LayerSpec:
    """Return a copy of a layer's specification from which the layer is made by calling `build`."""
    kept = copy.copy(spec) if isinstance(spec, LayerSpec) else LayerSpec(type(spec))
    kept.build = build
    return kept


def layer_of(name: str) -> str:
    """Return the part of a parameter's name that identifies its layer: the layer's number, or a tied layer's key."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "tied_modules" else parts[0]


def _trained(layer: nn.Module | None, expert: int = 1) -> int:
    """Return the number of a layer's elements that a rank trains.

    layer: the layer; None for a function, which has no elements.
    expert: the number of ranks over which the layer's experts are divided.
    """
    held = [] if layer is None else [each for each in layer.parameters() if each.requires_grad]
    routed = sum(each.numel() for each in held if is_moe_param(each))
    return sum(each.numel() for each in held) - routed + routed // expert


def _name(spec: Any) -> str | None:
    """Return the name of a layer that DeepSpeed's "type:" method compares with its pattern; None if there is none."""
    if isinstance(spec, LayerSpec):
        return str(spec.typename.__name__)
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", None)


def _built(model: PipelineModule, number: int, spec: Any) -> nn.Module | None:
    """Return the module of a layer; None if the layer is a function."""
    if isinstance(spec, TiedLayerSpec):
        tied: nn.Module = model.tied_modules[spec.key]
        return tied
    return model._modules[str(number)] if isinstance(spec, LayerSpec | nn.Module) else None


def refuse_uncuttable(model: PipelineModule) -> None:
    """Raise UnsupportedError for a module whose stages cannot be derived from its layers."""
    kind = type(model)
    if any(each.__name__ == "DualPipeVModule" for each in kind.__mro__):
        raise UnsupportedError(
            "DualPipeVModule: its stages hold layers of two places; build the model as a deepspeed.pipe.PipelineModule"
        )
    axes = [axis for axis in model._topo.get_axis_names() if axis not in ("pipe", "data")]
    if axes:
        raise UnsupportedError(
            f"PipelineModule over a topology with {', '.join(axes)}; leave topology= out and give num_stages="
        )
    for method in ("_build", "_partition_layers", "_set_bounds"):
        if getattr(kind, method) is not getattr(PipelineModule, method):
            raise UnsupportedError(
                f"{kind.__name__} has a {method} of its own, which switches do not follow; leave it out, and give "
                "boundaries to engine.switch"
            )


def refuse_stage_of_another(model: nn.Module, member: int) -> None:
    """Raise UnsupportedError if the module was built while another engine's world, with other ranks, was installed.

    member: this process's number in the launch.
    """
    if is_pipeline(model) and model.global_rank != member:
        raise UnsupportedError(
            f"PipelineModule: it was built as rank {model.global_rank} of another engine's world, and this is process "
            f"{member}; build all models before the first engine switches"
        )


def refuse_tied_experts(model: PipelineModule) -> None:
    """Raise UnsupportedError if a tied layer has experts."""
    for key, tied in model.tied_modules.items():
        if layers_with_experts(tied):
            raise UnsupportedError(
                f"tied_modules.{key} has experts: a tied layer is shared whole, and each rank holds "
                "only some of the experts; put the experts into a layer of their own"
            )


def refuse_shared(model: PipelineModule) -> None:
    """Raise UnsupportedError if a parameter would be on two stages, or on none.

    The module must have all layers.
    """
    refuse_tied_experts(model)
    owners: dict[int, str] = {}
    layers = {*model.fwd_map, *(f"tied_modules.{key}" for key in model.tied_modules)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = layer_of(name)
        if layer in layers and owners.setdefault(id(parameter), layer) != layer:
            raise UnsupportedError(
                f"parameter {name!r} also belongs to layer {owners[id(parameter)]}: with the layers on two stages it "
                "would become two parameters; use TiedLayerSpec for both layers"
            )
    strays = [name for name, parameter in model.named_parameters() if id(parameter) not in owners]
    if strays:
        raise UnsupportedError(
            f"parameter {strays[0]!r} is in no layer of the PipelineModule; move it into one of the layers"
        )
