"""What DeepSpeed's two kinds of experts have in common: AutoEP's (`experts`) and native ones (`moe`).

Everything hangs on the name `ep_size_N` of an expert size N: the groups of ranks, the marks on parameters
(`allreduce=False`, `group_name`) and the optimizer groups. Read off DeepSpeed 0.19.8, and measured in
`tests/adapters/test_experts.py` and `test_moe.py`:

- Ranks. Of the ranks of a pipeline stage, tensor ranks among them, N neighbours are an expert group (a rank's place in
  it is its *expert index*), and those with the same index are an expert-data group. Index i of N holds experts
  [i * E/N, (i + 1) * E/N), whatever its tensor index is.
- Optimizer groups. With an optimizer from the configuration `configure_moe_param_groups` takes the experts' tensors out
  of the user's groups (which need a `name` then) and adds, behind all of these, one group per user's group that has
  some, in the same order: a copy of its hyper-parameters with `moe=True` and `name="ep_size_N"`. Inside, tensors keep
  the order of the model. A group of more than 178,956,971 elements *on one rank* is split: how many there are depends
  on N. A group that is left without tensors is dropped. A client's optimizer is taken as it is: stages 1 and 2 and
  BF16_Optimizer want groups marked so, stage 3 and stage 0 do not. Tensors that AutoEP replaced in a list of a user's
  or in a client's optimizer (routers, experts) stand at the end of their group.
- Stages 1 and 2, BF16_Optimizer. A group of experts is dealt to the ranks of its expert-data group, of
  W = data x sequence x tensor / N ranks, and padded at its end to a multiple of 2 W; every other group as ever. Rank
  r's part is that of its place in the expert-data group, r // N.
- Stage 3. A tensor of experts is cut in ceil(numel / W) elements, where numel is what the expert index holds of it.
  A sub-group has tensors of one process group only: experts that share an optimizer group with others (a client's)
  come behind these, in sub-groups of their own, at N = 1 too. DeepSpeed has two groups of ranks then, which hold the
  same; where one object stands for both, they would not be parted.
- Gradients of experts are divided by the data size, whatever N is, and added up over the expert-data group: an update
  does not depend on N. Tensor ranks find gradients of experts that are as many times too large, and DeepSpeed divides
  them by the tensor size.
- The clipping norm of stages 1 to 3 and BF16_Optimizer is that of all experts, too. With tensor ranks stages 1 and 2
  count only the experts of tensor index 0, which `all_counted` puts right. In stage 0 DeepSpeed leaves experts out of
  it in bf16, and in fp32 takes the mean over ranks of the norms of what each of them holds, which depends on N: `clip`
  takes the norm of all.
- Pipelines. The data ranks of a stage are such a line of their own. ZeRO's stage 1 adds the norm of each optimizer
  group up over stages, BF16_Optimizer that of experts: a stage without any must have their group, and take part.
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

from ds_dynatrain.adapters.device import compute_device
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import Layout


def group_name(size: int) -> str:
    """DeepSpeed's name of an expert size."""
    return f"ep_size_{size}"


def expert_index(layout: Layout) -> int:
    """This rank's place in its expert group; the world of the layout is installed."""
    return int(groups._get_expert_parallel_rank(group_name(layout.expert)))


def check_size(counts: Mapping[str, int], size: int) -> None:
    """LayoutError, naming the layer and the nearest sizes, unless the size divides the experts of every layer.

    counts: number of experts by the name of the layer.
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
    """LayoutError for axes that were not tried together with experts; `tried`: axes that were."""
    known = {"data", "expert", *tried}
    wide = [f"{axis}={size}" for axis, size in layout.axes().items() if axis not in known and size > 1]
    if wide:
        raise LayoutError(f"{layout}: {', '.join(wide)} with experts is not supported; set these axes to 1")


def _nearest(whole: int, size: int) -> str:
    """The next divisors of `whole` below and above a size."""
    divisors = [part for part in range(1, whole + 1) if whole % part == 0]
    below = [part for part in divisors if part < size][-1:]
    above = [part for part in divisors if part > size][:1]
    return ", ".join(f"expert={part}" for part in (*below, *above))


def ask_for_present_groups(model: nn.Module) -> None:
    """Let layers that are whole yet ask for the groups of the expert size that the installed world has.

    DeepSpeed's constructor makes groups that are not there, which takes all ranks of the world.
    """
    (name,) = groups._get_expert_parallel_group_dict()
    for layer in layers_with_experts(model):
        for key in ("ep_group_name", "expert_group_name"):
            if hasattr(layer, key):
                setattr(layer, key, name)


def enter_layers(engine: Any, size: int) -> None:
    """What the engine's constructor sets for layers with experts: its lists of them, and the groups that they use.

    The world is installed, and the engine's module has the layers of this rank.
    """
    parts = list(engine.module.modules())
    layers = layers_with_experts(engine.module)
    marked = [group for group in engine.basic_optimizer.param_groups if group.get("moe")]
    engine.has_moe_layers = bool(layers or marked)  # a stage without experts takes part in what others do about them
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
    """Clip the gradients of ZeRO stage 0 in fp32 by the norm of all experts, of all parts, and of what every rank has.

    The world of the layout is installed. What pipeline stages share counts on the stage that owns it.
    """
    given = [(held, held.grad) for held in model.parameters() if held.grad is not None]
    squares = torch.zeros(3, device=compute_device())  # of whole tensors, of parts of tensors, of experts
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
    """Inside the block the norm of gradients of ZeRO stages 1 and 2 is that of all experts, also with tensor ranks.

    DeepSpeed adds up over all ranks, and counts what is no part of a tensor on tensor index 0 alone. What a rank has of
    its experts nobody else has.
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
    """Let layers hold no group of ranks; a gate takes one only then."""
    part: Any
    for part in model.modules():
        if isinstance(part, TopKGate | MOELayer) or getattr(part, "_is_autoep_layer", False):
            part.ep_group = None


def layers_with_experts(model: nn.Module) -> list[Any]:
    """Native ones, and AutoEP's."""
    return [part for part in model.modules() if isinstance(part, MoE) or getattr(part, "_is_autoep_layer", False)]


def refuse_mixed_groups(parameter_groups: Iterable[Mapping[str, Any]]) -> None:
    """UnsupportedError, with the number of the group, for experts in an optimizer group that is not marked as theirs.

    DeepSpeed takes such a group in stages 0 and 3 alone.
    """
    for number, group in enumerate(parameter_groups):
        routed = [is_moe_param(held) for held in group["params"]]
        if any(routed) and not (all(routed) and group.get("moe")):
            raise UnsupportedError(
                f"optimizer group {number} holds experts and is not marked as a group of experts alone: give the "
                "optimizer in the configuration, or a function that makes it from "
                "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(...)"
            )
