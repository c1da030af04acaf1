"""Rules that both kinds of DeepSpeed's experts share, and its native kind: `deepspeed.moe.layer.MoE`.

The logical model is the user's model with expert size 1. Each expert has parameters of its own, named by the expert's
number in the whole layer: `...deepspeed_experts.5.fc.weight`. A rank has only the modules of its own experts, and
numbers them from 0. The expert axis does not cut tensors; it determines which ranks have them. All experts of a layer
are copies of one module (`Experts` makes them so), and a rank's experts are built from that module.

DeepSpeed has no native experts under stage 3. A layer's capacity follows from the number of tokens on a rank, not from
the expert size, so a layer that drops tokens drops different ones in another world.

DeepSpeed uses the name `ep_size_N` of an expert size N everywhere: for the groups of ranks, the attributes of
parameters (`allreduce=False`, `group_name`) and the optimizer groups. The following rules were read from the code of
DeepSpeed 0.19.8, and measured in `tests/adapters/test_experts.py` and `test_moe.py`:

- Ranks. In a pipeline stage, tensor ranks included, N neighbouring ranks are an expert group (a rank's position in this
  group is its *expert index*), and ranks with the same index are an expert-data group. Index i of N holds experts [i *
  E/N, (i + 1) * E/N), whatever the tensor index.
- Optimizer groups. If the optimizer comes from the configuration, `configure_moe_param_groups` takes the experts'
  tensors out of the user's groups (which then need a `name`). After all of these it adds, in the same order, one group
  for each of the user's groups that has experts: a copy of its hyper-parameters with `moe=True` and `name="ep_size_N"`.
  Within a group, tensors keep the order of the model. A group of more than 178,956,971 elements *on one rank* is split,
  so the number of groups depends on N. A group that is left without tensors is dropped. A client's optimizer is taken
  as it is: stages 1 and 2 and BF16_Optimizer require groups marked in this way; stage 3 and stage 0 do not. Tensors
  (routers, experts) that AutoEP replaced in a user's list or in a client's optimizer are at the end of their group.
- Stages 1 and 2, BF16_Optimizer. A group of experts is partitioned over the W = data x sequence x tensor / N ranks of
  its expert-data group, and padded at its end to a multiple of 2 W. Every other group is partitioned as without
  experts. Rank r has the part whose number is the rank's position in the expert-data group, r // N.
- Stage 3. A tensor of experts is cut into parts of ceil(numel / W) elements, where numel is the size of the expert
  index's part of the tensor. A sub-group has tensors of only one process group. Experts that share an optimizer group
  with other tensors (in a client's optimizer) therefore come after these, in sub-groups of their own, even at N = 1.
  DeepSpeed then has two groups with the same ranks; if one object served as both, the tensors would not be separated.
- Gradients of experts are divided by the data size, for every N, and added up over the expert-data group, so an update
  does not depend on N. With tensor ranks, gradients of experts are too large by a factor of the tensor size, and
  DeepSpeed divides them by it.
- The clipping norm of stages 1 to 3 and BF16_Optimizer includes all experts. With tensor ranks, stages 1 and 2 count
  only the experts of tensor index 0, which `all_counted` corrects. In stage 0, DeepSpeed leaves experts out of the norm
  in bf16; in fp32 it takes the mean, over ranks, of the norms of each rank's tensors, which depends on N. `clip`
  instead takes the norm of all tensors.
- Pipelines. These rules hold for the ranks of each stage. ZeRO's stage 1 adds up the norm of each optimizer group over
  stages, and BF16_Optimizer that of experts, so a stage without experts must have their group and take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import nn

from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.adapters.model.shaper import (
    Cuts,
    Lists,
    Made,
    ModelFactory,
    Shaper,
    copied,
    template_of,
    without_memory,
)
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import AxisCuts, Layout, Pick


def group_name(size: int) -> str:
    """Return DeepSpeed's name for process groups of the given expert size."""
    return f"ep_size_{size}"


def expert_index(layout: Layout) -> int:
    """Return this rank's index in its expert group. The world of the layout must be installed."""
    return int(groups._get_expert_parallel_rank(group_name(layout.expert)))


def check_size(counts: Mapping[str, int], size: int) -> None:
    """Raise LayoutError unless the expert size divides the number of experts of every layer.

    The error names the layer and the nearest sizes.

    counts: the number of experts in each layer, keyed by the layer's name.
    """
    if not counts and size > 1:
        raise LayoutError(f"expert={size}: the model has no experts; give the size 1")
    for name, count in counts.items():
        if count % size:
            raise LayoutError(
                f"expert={size} does not divide the {count} experts of {name!r} (remainder {count % size}); "
                f"nearest: {_nearest(math.gcd(*counts.values()), size)}"
            )


def refuse_other_axes(layout: Layout, *tried: str) -> None:
    """Raise LayoutError if a layout uses an axis that has not been tested together with experts.

    tried: the axes besides data and expert that have been tested.
    """
    known = {"data", "expert", *tried}
    wide = [f"{axis}={size}" for axis, size in layout.axes().items() if axis not in known and size > 1]
    if wide:
        raise LayoutError(f"{layout}: {', '.join(wide)} with experts is not supported; set these axes to 1")


def _nearest(whole: int, size: int) -> str:
    """Return a description of the nearest divisors of `whole` below and above a size."""
    divisors = [part for part in range(1, whole + 1) if whole % part == 0]
    below = [part for part in divisors if part < size][-1:]
    above = [part for part in divisors if part > size][:1]
    return ", ".join(f"expert={part}" for part in (*below, *above))


def ask_for_present_groups(model: nn.Module) -> None:
    """Make layers that still have all experts use the expert size of the installed world, whose groups exist.

    DeepSpeed's constructor would make groups that do not exist, and all ranks of the world would have to take part.
    """
    (name,) = groups._get_expert_parallel_group_dict()
    for layer in layers_with_experts(model):
        for key in ("ep_group_name", "expert_group_name"):
            if hasattr(layer, key):
                setattr(layer, key, name)


def enter_layers(engine: Any, size: int) -> None:
    """Set in the engine its lists of layers with experts, and their process groups, as DeepSpeed's constructor does.

    Called once the world is installed and the engine's module has this rank's layers.

    size: the expert size.
    """
    parts = list(engine.module.modules())
    layers = layers_with_experts(engine.module)
    marked = [group for group in engine.basic_optimizer.param_groups if group.get("moe")]
    engine.has_moe_layers = bool(layers or marked)  # even a rank without experts takes part in their collectives
    engine.num_experts = [layer.num_experts for layer in layers]
    engine.gate_modules = [part for part in parts if isinstance(part, TopKGate)]
    engine.moe_layers = [part for part in parts if isinstance(part, MOELayer)]
    for part in (*engine.gate_modules, *engine.moe_layers):
        part.wall_clock_breakdown = bool(engine.wall_clock_breakdown())
    leave_groups(engine.module)
    for layer in layers:
        layer.set_deepspeed_parallelism(False)
    engine.expert_parallel_group = groups._get_expert_parallel_group_dict()
    engine.expert_data_parallel_group = groups._get_expert_data_parallel_group_dict()
    for group in marked:
        group["name"] = group_name(size)


def clip(model: nn.Module, limit: float, layout: Layout) -> None:
    """Clip the gradients of ZeRO stage 0 in fp32 by their norm over the whole model.

    The norm counts all experts, all parts of cut tensors, and each replicated tensor once. A tensor that several
    pipeline stages share counts on the stage that owns it. The world of the layout must be installed.
    """
    given = [(held, held.grad) for held in model.parameters() if held.grad is not None]
    squares = torch.zeros(3, device=compute_device())  # one sum each for whole tensors, parts of tensors, and experts
    for held, gradient in given:
        if not getattr(held, "ds_pipe_replicated", False):
            kind = 2 if is_moe_param(held) else int(is_model_parallel_parameter(held))
            squares[kind] += gradient.detach().float().norm() ** 2
    dist.all_reduce(squares[2:], group=groups._get_max_expert_parallel_group())
    if layout.tensor > 1:
        dist.all_reduce(squares[1:2], group=groups.get_tensor_model_parallel_group())
    if layout.pipe > 1:
        dist.all_reduce(squares, group=groups.mpu.get_model_parallel_group())
    scale = min(1.0, limit / (float(squares.sum().sqrt()) + 1e-6))
    for _, gradient in given:
        gradient.mul_(scale)


@contextmanager
def all_counted(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Context manager in which the gradient norm of ZeRO stages 1 and 2 counts all experts, even with tensor ranks.

    DeepSpeed sums over all ranks, but counts uncut tensors only on tensor index 0, because tensors on the other indices
    are usually copies. Experts are also uncut, but no other rank holds the same ones.
    """
    marked: list[Any] = [held for held in model.parameters() if is_moe_param(held)] if layout.tensor > 1 else []
    for held in marked:
        held.tensor_model_parallel = True
    try:
        yield
    finally:
        for held in marked:
            del held.tensor_model_parallel


def leave_groups(model: nn.Module) -> None:
    """Remove the process groups from all layers with experts. A gate accepts new groups only after its old ones are
    removed.
    """
    part: Any
    for part in model.modules():
        if isinstance(part, TopKGate | MOELayer):
            part.ep_group = None
        elif getattr(part, "_is_autoep_layer", False):
            part.ep_group = part.tp_group = part.folding_group_handles = None


def layers_with_experts(model: nn.Module) -> list[Any]:
    """Return all layers with experts, both native layers and AutoEP's."""
    return [part for part in model.modules() if isinstance(part, MoE) or getattr(part, "_is_autoep_layer", False)]


def refuse_mixed_groups(parameter_groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnsupportedError for an optimizer group with experts that is not marked as a group of experts alone.

    The error contains the group's number. DeepSpeed accepts such a group in stages 0 and 3 only.
    """
    for number, group in enumerate(parameter_groups):
        routed = [is_moe_param(held) for held in group["params"]]
        if any(routed) and not (all(routed) and group.get("moe")):
            raise UnsupportedError(
                f"optimizer group {number} holds experts and is not marked as a group of experts alone: give the "
                "optimizer in the configuration, or a function that makes it from "
                "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(...)"
            )


def layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) for each layer with native experts."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, MoE))


def start_size(model: nn.Module) -> int:
    """Return the expert size with which the user built the model.

    Raises UnsupportedError if layers have different sizes.
    """
    sizes = {name: int(layer.ep_size) for name, layer in layers(model)}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name!r} has ep_size={size}" for name, size in sizes.items())
        raise UnsupportedError(f"experts of several sizes: {found}; build all layers of deepspeed.moe with one ep_size")
    return next(iter(sizes.values()), 1)


def first_dropping_layer(module: nn.Module) -> str | None:
    """Return the name of the first layer that drops tokens beyond its capacity; None if no layer does.

    The capacity follows from the number of tokens on a rank, and DeepSpeed exchanges buffers of that size between
    ranks. Ranks with different numbers of tokens would therefore crash in the exchange.
    """
    return next((name for name, layer in layers(module) if layer.deepspeed_moe.gate.drop_tokens), None)


class NativeShaper(Shaper):
    """Shaper of a model with native experts (`deepspeed.moe`).

    owners: a map from each expert parameter's id to the launch process that holds its initial value; see `complete`.
    """

    def __init__(
        self,
        model: nn.Module,
        member: int,
        lists: Lists = (),
        factory: ModelFactory | None = None,
    ) -> None:
        """Take over a user's model, and add the experts that this process has not built; see `complete`."""
        self._template = template_of(model, factory)
        self._cuts: dict[int, Cuts] = {}
        self.owners = complete(model, member, lists)
        resize(self._template, 1)

    def cuts(self, layout: Layout) -> Cuts:
        """Return a map from tensor name to cuts that state which expert index holds each expert's tensors.

        Raises LayoutError under the same conditions as `check_size`.
        """
        refuse_other_axes(layout)
        if layout.expert not in self._cuts:
            self._cuts[layout.expert] = cuts_of(self._template, layout.expert)
        return self._cuts[layout.expert]

    def make(self, layout: Layout, rank: int) -> Made:
        """Return copies of the template's children, with the number of experts that a rank has."""
        made = copied(self._template)
        resize(made, layout.expert)
        return Made(made)

    def enter(self, engine: Any, layout: Layout) -> None:
        """Give the layers their groups of ranks, even if the module is unchanged."""
        enter_layers(engine, layout.expert)

    def leave(self, engine: Any) -> None:
        """Remove the world's groups from all layers."""
        leave_groups(engine.module)


def complete(model: nn.Module, member: int, lists: Lists = ()) -> dict[int, int]:
    """Add to the layers of a user's model the experts that were built on other ranks; they have no storage here.

    member: the number of this process in the launch.
    lists: the caller's lists of parameters, such as an optimizer's. The parameters of all experts are added to them.

    Returns a map from each expert parameter's id to the launch process that holds its initial value; {} if every
    process has built all experts.

    Raises UnsupportedError if layers have different expert sizes, or if a layer's experts differ from each other.
    """
    size, owners = start_size(model), dict[int, int]()
    for path, layer in layers(model):
        held = layer.deepspeed_moe.experts
        pattern, mine, whole = _pattern(path, held.deepspeed_experts), list(held.deepspeed_experts), []
        for number in range(layer.num_experts):
            index, local = divmod(number, len(mine))
            whole.append(mine[local] if index == member % size else without_memory(copied(pattern)))
            if size > 1:
                owners.update(dict.fromkeys(map(id, whole[-1].parameters()), index))
        held.deepspeed_experts = nn.ModuleList(whole)
        _mark(layer, 1)
    if size > 1:
        _complete_lists(model, lists)
    return owners


def resize(module: nn.Module, size: int) -> None:
    """Give each layer, on the meta device, the number of experts that one rank has.

    size: the expert size, which must divide the number of all experts.

    A module without experts, such as some pipeline stages, is left unchanged.
    """
    for path, layer in layers(module):
        held, count = layer.deepspeed_moe.experts, layer.num_experts // size
        pattern, there = _pattern(path, held.deepspeed_experts), list(held.deepspeed_experts)[:count]
        held.deepspeed_experts = nn.ModuleList([*there, *(copied(pattern) for _ in range(count - len(there)))])
        _mark(layer, size)


def parameters(root: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
    """Return the parameters of a rank's module, keyed by logical name. The world of the layout must be installed.

    A logical name is DeepSpeed's name in the whole model, with experts numbered in the whole layer.
    """
    named = names(root, expert_index(layout))
    return {named[name]: held for name, held in root.named_parameters()}


def names(module: nn.Module, index: int) -> dict[str, str]:
    """Return a map from each parameter's local name in a rank's module to its logical name.

    index: the rank's expert index.
    """
    found = {name: name for name, _ in module.named_parameters()}
    for path, layer in layers(module):
        for local, prefix, held in _experts(path, layer):
            number = index * layer.num_local_experts + local
            of_expert = [name for name, _ in held.named_parameters()]
            found.update({f"{prefix}.{local}.{name}": f"{prefix}.{number}.{name}" for name in of_expert})
    return found


def _complete_lists(model: nn.Module, lists: Lists) -> None:
    """Add the parameters of all experts of a layer to each list that contains those of some of them."""
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
        listed[first:] = [*order, *(parameter for parameter in listed[first:] if id(parameter) not in place)]


def cuts_of(whole: nn.Module, size: int) -> Cuts:
    """Return a map from tensor name to cuts, for a module that has all experts.

    size: the expert size. Raises LayoutError if it does not divide the experts of every layer.
    """
    found = dict(layers(whole))
    check_size({name: layer.num_experts for name, layer in found.items()}, size)
    cuts = {name: AxisCuts() for name, _ in whole.named_parameters()}
    for path, layer in found.items():
        for number, prefix, held in _experts(path, layer):
            holder = AxisCuts(expert=Pick(size, (number * size // layer.num_experts,)))
            cuts.update({f"{prefix}.{number}.{name}": holder for name, _ in held.named_parameters()})
    return cuts


def _experts(path: str, layer: Any) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (local number, name of the list that contains it, module) for each expert of a layer."""
    prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts".removeprefix(".")
    return ((number, prefix, held) for number, held in enumerate(layer.deepspeed_moe.experts.deepspeed_experts))


def _mark(layer: Any, size: int) -> None:
    """Set every attribute that DeepSpeed's constructors derive from the expert size."""
    routed = layer.deepspeed_moe
    held, name = routed.experts, group_name(size)
    for parameter in held.deepspeed_experts.parameters():
        parameter.allreduce, parameter.group_name = False, name
    layer.num_local_experts = routed.num_local_experts = held.num_local_experts = layer.num_experts // size
    layer.ep_size = routed.ep_size = size
    layer.expert_group_name = routed.ep_group_name = name


def _pattern(path: str, experts: nn.ModuleList) -> nn.Module:
    """Return a template of a layer's experts.

    Raises UnsupportedError if the experts differ from each other or hold buffers.
    """
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
    return template_of(experts[0])
