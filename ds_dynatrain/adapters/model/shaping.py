"""The shape of a model under the sizes of the pipe, expert and tensor axes: how its tensors are cut, and its local
module.

There is one shaper for each of DeepSpeed's methods of distributing a model. A change of these sizes, or of a member's
index on these axes, gives the root module other children. The root itself stays, and with it every reference to the
root. How ZeRO partitions tensors follows from numbers in DeepSpeed's configuration, which `rules_of` returns in the
form that `space` needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.model import auto_ep as experts
from ds_dynatrain.adapters.model import moe
from ds_dynatrain.adapters.model.module_state import note_one, pass_on
from ds_dynatrain.adapters.model.moe import layers_with_experts
from ds_dynatrain.adapters.model.pipeline_layers import Cut, is_pipeline
from ds_dynatrain.adapters.model.shaper import Lists, ModelFactory, Shaper, pass_hooks_on
from ds_dynatrain.adapters.model.stage_module import PipelineShaper
from ds_dynatrain.adapters.model.ulysses import spread_layers
from ds_dynatrain.adapters.versions.deepspeed_versions import aligns_parameters, present
from ds_dynatrain.adapters.zero.optimizers import holds_flat_groups
from ds_dynatrain.errors import ConfigError, LayoutError
from ds_dynatrain.space import Layout, Partition, ZeroRules
from ds_dynatrain.support.axes import EXPERTS, NATIVE_EXPERTS, PIPELINE, ULYSSES, Features
from ds_dynatrain.support.row import Config

_STRUCTURE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


def shaper_of(
    model: nn.Module,
    config: Config,
    member: int = 0,
    lists: Lists = (),
    factory: ModelFactory | None = None,
    owners: Mapping[int, int] | None = None,
    cut: Cut | None = None,
) -> Shaper:
    """Return the shaper of a user's model that DeepSpeed has not altered yet. The shaper takes over the model.

    From then on the model has one parameter for each logical tensor.

    member: this process's number in the launch.
    lists: the caller's lists of the model's parameters, such as an optimizer's.
    factory: function that builds the model anew if it cannot be copied.
    owners: the result of `put_together`.
    cut: function that partitions layers into stages if `pipeline.partition` is "profile".
    """
    if is_pipeline(model):
        return PipelineShaper(model, config, member, lists, owners, cut)
    if experts.is_on(config):
        from ds_dynatrain.adapters.model.auto_tp import AutoEPShaper

        return AutoEPShaper(model, config, listed=bool(lists), factory=factory)
    if layers_with_experts(model):
        return moe.NativeShaper(model, member, lists, factory)
    if present().is_newest:
        from ds_dynatrain.adapters.model.auto_tp import TensorShaper

        return TensorShaper.of(model, config, factory)
    return Shaper()


def start_size(axis: str, model: Any, config: Config, asked: int | None) -> int:
    """Return the initial size of the pipe, tensor or expert axis.

    This is the size that the model or DeepSpeed's settings already have, else `asked`, else 1.

    axis: the name of the axis.
    asked: the size in `dynatrain.layout`; None if it is not given.

    Raises ConfigError if `asked` differs from the size of the model or of DeepSpeed's settings.
    """
    own, where = None, ""
    if axis == "pipe" and is_pipeline(model) and model.num_stages > 1:
        own, where = int(model.num_stages), "the PipelineModule's num_stages"
    elif axis == "tensor":
        own, where = (config.get("tensor_parallel") or {}).get("autotp_size") or None, "tensor_parallel.autotp_size"
    elif axis == "expert" and experts.is_on(config) and config["expert_parallel"].get("autoep_size") is not None:
        own, where = experts.start_size(config), "expert_parallel.autoep_size"
    elif axis == "expert" and moe.start_size(model) > 1:
        own, where = moe.start_size(model), "ep_size of the model's layers"
    if own is not None and asked not in (None, own):
        raise ConfigError(f"dynatrain.layout.{axis} is {asked} and {where} is {own}; leave dynatrain.layout.{axis} out")
    return own or asked or 1


def partition_of(shaper: Shaper, names: tuple[str, ...], layout: Layout) -> Partition:
    """Return the cuts of all logical tensors, in the order of `names`. Raises LayoutError if the shaper lacks one."""
    cuts = shaper.cuts(layout)
    missing = [name for name in names if name not in cuts]
    if missing:
        raise LayoutError(
            f"{layout}: it is unknown how to cut {missing[0]!r} ({len(missing)} such tensors); register it in a module "
            "of the model before initialize, or set pipe, expert and tensor to 1"
        )
    return tuple(cuts[name] for name in names)


@dataclass(frozen=True)
class Shape:
    """The inputs that determine a root module's children: the sizes of the axes, and this member's index on each."""

    pipe: int
    boundaries: tuple[int, ...] | None
    expert: int
    tensor: int
    place: tuple[int, int, int]

    @staticmethod
    def of(layout: Layout, rank: int) -> Shape:
        """Return the sizes of the axes in a layout, and a rank's index on each of them."""
        at = layout.coordinate(rank)
        place = (at["pipe"], layout.expert_place(rank)[0], at["tensor"])
        return Shape(layout.pipe, layout.boundaries, layout.expert, layout.tensor, place)


WHOLE_SHAPE = Shape(1, None, 1, 1, (0, 0, 0))


@dataclass(frozen=True, eq=False)
class Children:
    """A record of a root module's children, own tensors and attributes, from which they can be restored."""

    attributes: Mapping[str, Any]

    @staticmethod
    def of(root: nn.Module) -> Children:
        """Record a root's children. Later changes of the root must replace the children and never alter them."""
        return Children(_copied(root.__dict__))

    def pass_on(self, root: nn.Module, is_resized: bool) -> None:
        """Give the root's new children the user's hooks, and the state of their predecessors except for parameters.

        A child without a predecessor gets the mode of its parent.

        is_resized: see `module_state.pass_on`.
        """
        before = nn.Module()
        before.__dict__.update(self.attributes)
        old, new = (dict(each.named_modules(remove_duplicate=False)) for each in (before, root))
        del old[""], new[""]
        for name, child in new.items():
            note_one(child)
            child.training = new.get(name.rpartition(".")[0], root).training
            if name in old:
                pass_on(old[name], child, is_resized)
        pass_hooks_on(old, new)

    def put_back(self, root: nn.Module) -> None:
        """Give the root module the recorded children, tensors and attributes again instead of its current ones."""
        root.__dict__.clear()
        root.__dict__.update(_copied(self.attributes))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: type(held)(held) if name in _STRUCTURE else held for name, held in attributes.items()}


ALIGNED_BYTES = 16
"""Multiple to which `parameter_alignment` rounds up the start of a tensor."""


def rules_of(host: Any) -> ZeroRules:
    """Return the rules by which ZeRO partitions tensors in all layouts, from DeepSpeed's own reading of the
    configuration.

    ZeRO-3's persistent parameters are treated like any others: they are gathered again at their first use. For a
    pipeline in bf16 without ZeRO, DeepSpeed uses its BF16_Optimizer, as it does at stage 1.
    """
    itemsize = int(host.model_map.dtype.itemsize)
    types, is_apart = host.engine.get_data_types(), host.in_leaves or host.engine.zero_cpu_offload()
    accumulates = types == (torch.bfloat16, torch.float32) and not is_apart  # in BF16_Optimizer
    flat = frozenset({2} if accumulates else {1, 2})
    return ZeroRules(
        flat_without_zero=holds_flat_groups(host.basic_optimizer, host.element_types),
        parts_without_zero=is_pipeline(host.module) and host.model_map.dtype == torch.bfloat16,
        sub_group_size=int(host.engine.zero_sub_group_size()),
        round_robin_stages=flat if host.engine.zero_round_robin_gradients() else frozenset(),
        ordered_stages=flat,
        aligned_stages=flat if aligns_parameters(host.engine) else frozenset(),
        weight_alignment=ALIGNED_BYTES // gcd(ALIGNED_BYTES, itemsize),
    )


def features_of(model: nn.Module, config: Config, mpu: Any) -> Features:
    """Return the features of a model that determine which layouts it can have (see `support/axes`).

    DeepSpeed must not have altered the model yet.
    """
    found = {
        PIPELINE: is_pipeline(model),
        EXPERTS: experts.is_on(config),
        NATIVE_EXPERTS: any(moe.layers(model)),
        ULYSSES: mpu is not None or any(spread_layers(model)),
    }
    return frozenset(feature for feature, is_there in found.items() if is_there)
