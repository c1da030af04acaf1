"""BF16_Optimizer: what DeepSpeed takes at stage 1 for bf16 weights whose gradients are accumulated in fp32.

It is laid out as ZeRO stages 1 and 2 are (`stage12`), without their options of order and alignment. On every rank it
also keeps whole fp32 gradients, which are zero between two steps: they are built anew, and no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch

from ds_dynatrain.adapters.device import compute_device
from ds_dynatrain.adapters.flat import FlatGroups, Slots, end_to_end, is_empty_group
from ds_dynatrain.adapters.fragments import relink
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.state import Buffers, Scalars


def count_empty_experts(optimizer: Any, model: ModelMap) -> None:
    """Before a step, let a pipeline stage without experts add 0 to their norm.

    DeepSpeed adds it up over stages in a collective that it leaves out where no expert has a gradient.
    """
    for group, has_gradient in enumerate(optimizer.fp32_groups_has_gradients):
        if is_empty_group(model, group) and optimizer.param_groups[group].get("moe"):
            has_gradient[-1] = True


@contextmanager
def stage_without_gradients(optimizer: Any) -> Iterator[None]:
    """Inside the block a pipeline stage that counts no gradient adds 0 to the norm; DeepSpeed stacks an empty list."""
    own = optimizer.get_grads_for_norm

    def at_least_one(for_clipping: bool = False) -> Any:
        found = own(for_clipping)
        if for_clipping or found[0]:
            return found
        return [torch.zeros(1, device=compute_device())], found[1]

    with replaced(optimizer, "get_grads_for_norm", at_least_one):
        yield


class AccumulatingStage(FlatGroups):
    """BF16_Optimizer; see the module."""

    def flats(self, held: Any) -> Sequence[torch.Tensor]:
        """See `FlatGroups`."""
        return list(held.bf16_groups_flat)

    def masters(self, held: Any) -> Sequence[torch.Tensor]:
        """See `FlatGroups`."""
        return list(held.fp32_groups_flat_partition)

    def slots(self, held: Any, model: ModelMap, group: int) -> tuple[int, Slots]:
        """By the order and the sizes of `bf16_groups`."""
        rank = dist.get_rank(group=held.real_dp_process_group[group])
        return rank * held.fp32_groups_flat_partition[group].numel(), end_to_end(model, held.bf16_groups[group])

    def put_weights(self, held: Any, model: ModelMap, group: int, flat: torch.Tensor) -> None:
        """Their parts, too."""
        held.bf16_groups_flat[group] = flat
        held._update_storage_to_flattened_tensor(held.bf16_groups[group], flat)
        held.bf16_partitioned_groups[group] = list(flat.split(held.fp32_groups_flat_partition[group].numel()))

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Fragment maps are linked anew."""
        super().refill(engine, model, buffers, scalars)
        relink(engine.optimizer)
