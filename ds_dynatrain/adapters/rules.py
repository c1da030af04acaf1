"""The numbers of DeepSpeed's configuration that decide where ZeRO cuts, as `space` wants them."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from ds_dynatrain.adapters.optimizers import holds_flat_groups
from ds_dynatrain.adapters.pipeline import is_pipeline
from ds_dynatrain.adapters.versions import aligns_parameters
from ds_dynatrain.space import ZeroRules

ALIGNED_BYTES = 16
"""What `parameter_alignment` rounds the start of a tensor up to."""


def rules_of(host: Any) -> ZeroRules:
    """The rules of all layouts, from DeepSpeed's own reading of the configuration.

    ZeRO-3's persistent parameters are parts like any others: they are gathered again at their first use.
    """
    itemsize = int(host.model_map.dtype.itemsize)
    flat = _stages_with_options(host)
    return ZeroRules(
        flat_without_zero=holds_flat_groups(host.basic_optimizer, host.element_types),
        parts_without_zero=parts_without_zero(host),
        sub_group_size=int(host.engine.zero_sub_group_size()),
        round_robin_stages=flat if host.engine.zero_round_robin_gradients() else frozenset(),
        aligned_stages=flat if aligns_parameters(host.engine) else frozenset(),
        weight_alignment=ALIGNED_BYTES // gcd(ALIGNED_BYTES, itemsize),
    )


def parts_without_zero(host: Any) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer at stage 0: for a pipeline in bf16."""
    return is_pipeline(host.module) and host.model_map.dtype == torch.bfloat16


def _stages_with_options(host: Any) -> frozenset[int]:
    """Stages whose optimizer knows the two options: not stage 1 where it is BF16_Optimizer."""
    types, is_apart = host.engine.get_data_types(), host.in_leaves or host.engine.zero_cpu_offload()
    if types == (torch.bfloat16, torch.float32) and not is_apart:
        return frozenset({2})
    return frozenset({1, 2})
