"""What DeepSpeed's two kinds of experts have in common: AutoEP's (`experts`) and native ones (`moe`).

Everything hangs on the name `ep_size_N` of an expert size N: the groups of ranks, the marks on parameters
(`allreduce=False`, `group_name`) and the optimizer groups. Read off DeepSpeed 0.19.8, and measured in
`tests/adapters/test_experts.py` and `test_moe.py`:

- Ranks. On the line of data x sequence ranks, N neighbours are an expert group (a rank's place in it is its *expert
  index*), and those with the same index are an expert-data group. Index i of N holds experts [i * E/N, (i + 1) * E/N).
- Optimizer groups. With an optimizer from the configuration `configure_moe_param_groups` takes the experts' tensors out
  of the user's groups (which need a `name` then) and adds, behind all of these, one group per user's group that has
  some, in the same order: a copy of its hyper-parameters with `moe=True` and `name="ep_size_N"`. Inside, tensors keep
  the order of the model. A group of more than 178,956,971 elements *on one rank* is split: how many there are depends
  on N. A group that is left without tensors is dropped. A client's optimizer is taken as it is: stages 1 and 2 and
  BF16_Optimizer want groups marked so, stage 3 and stage 0 do not. Tensors that AutoEP replaced in a list of a user's
  or in a client's optimizer (routers, experts) stand at the end of their group.
- Stages 1 and 2, BF16_Optimizer. A group of experts is dealt to the ranks of its expert-data group, of
  W = data x sequence / N ranks, and padded at its end to a multiple of 2 W; every other group as ever. Rank r's part is
  that of its place in the expert-data group, r // N.
- Stage 3. A tensor of experts is cut in ceil(numel / W) elements, where numel is what the expert index holds of it.
  A sub-group has tensors of one process group only: experts that share an optimizer group with others (a client's)
  come behind these, in sub-groups of their own, at N = 1 too. DeepSpeed has two groups of ranks then, which hold the
  same; where one object stands for both, they would not be parted.
- Gradients of experts are divided by the data size, whatever N is, and added up over the expert-data group: an update
  does not depend on N. That holds for the clipping norm of stages 1 to 3 and BF16_Optimizer too, which is that of all
  experts. In stage 0 it does not: DeepSpeed takes the mean over ranks of the norms of what each of them holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups

from ds_dynatrain.errors import LayoutError
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


def _nearest(whole: int, size: int) -> str:
    """The next divisors of `whole` below and above a size."""
    divisors = [part for part in range(1, whole + 1) if whole % part == 0]
    below = [part for part in divisors if part < size][-1:]
    above = [part for part in divisors if part > size][:1]
    return ", ".join(f"expert={part}" for part in (*below, *above))


def rename_groups(optimizer: torch.optim.Optimizer, size: int) -> None:
    """Optimizer groups of experts carry the name of their expert size."""
    for group in optimizer.param_groups:
        if group.get("moe"):
            group["name"] = group_name(size)


def enter_layers(engine: Any) -> None:
    """What the engine's constructor sets for layers with experts: its lists of them, and the groups that they use.

    The world is installed, and the engine's module has the layers of this rank.
    """
    parts = list(engine.module.modules())
    layers = [part for part in parts if isinstance(part, MoE) or getattr(part, "_is_autoep_layer", False)]
    engine.has_moe_layers = bool(layers)
    engine.num_experts = [layer.num_experts for layer in layers]
    engine.gate_modules = [part for part in parts if isinstance(part, TopKGate)]
    engine.moe_layers = [part for part in parts if isinstance(part, MOELayer)]
    for part in (*engine.gate_modules, *engine.moe_layers):
        part.wall_clock_breakdown = bool(engine.wall_clock_breakdown())
    for gate in engine.gate_modules:
        gate.ep_group = None  # it takes a group only once
    for layer in layers:
        layer.set_deepspeed_parallelism(False)
    engine.expert_parallel_group = groups._get_expert_parallel_group_dict()
    engine.expert_data_parallel_group = groups._get_expert_data_parallel_group_dict()
