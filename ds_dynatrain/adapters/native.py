"""What DeepSpeed's compiled CPU optimizers keep for themselves, besides the state that a switch carries.

`Adam_Optimizer` (csrc/includes/cpu_adam.h) multiplies its powers of the betas up from step to step, in float: a member
that has trained all along and one that has just woken correct their averages by numbers that differ in the last bit,
and replicas would drift apart. A call with other betas makes it compute the powers afresh at its next step, the same
on every member. FusedAdam has one such object per process and mode, DeepSpeedCPUAdam one of its own. Lion has none.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from ds_dynatrain.adapters.optimizers import MUON, full_name

_NO_BETA = -1.0
"""No optimizer's own: torch and DeepSpeed want 0 <= beta < 1."""


def forget_running_products(optimizer: Any) -> None:
    """Have the optimizer compute its powers of the betas afresh at the next step; call it on all members alike."""
    if full_name(type(optimizer)) == MUON and optimizer.aux_optimizer is not None:
        optimizer = optimizer.aux_optimizer
    parts = [torch.zeros(1) for _ in range(4)]
    if isinstance(optimizer, DeepSpeedCPUAdam):
        rest = 0.0, _NO_BETA, _NO_BETA, 1.0, 0.0, False, *parts
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1, *rest)
    elif isinstance(optimizer, FusedAdam) and get_accelerator().device_name() == "cpu":
        lists = [[part] for part in parts]
        settings = 0.0, _NO_BETA, _NO_BETA, 1.0, 1, optimizer.adam_w_mode, 0, 0.0
        optimizer.multi_tensor_adam(1, optimizer._dummy_overflow_buf, lists, *settings)
