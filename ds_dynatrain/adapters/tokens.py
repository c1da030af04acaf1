"""Gradients by token counts: accumulated as sums over tokens, divided by the window's global count before clipping.

A mean over micro-batches of unequal token counts is not the mean over the tokens. So each micro-batch's mean loss is
multiplied by its own count, and at the boundary the accumulated gradient, which DeepSpeed has divided by the number of
micro-batches, is divided by tokens per micro-batch. This uses the place, before clipping, where DeepSpeed divides by
its loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_dynatrain.adapters import scaler
from ds_dynatrain.adapters.offload import old_gradients_kept


@contextmanager
def divided_by_tokens(engine: Any, own: int | None, slots: int) -> Iterator[None]:
    """Make the optimizer's step inside the block divide its gradients by the mean number of tokens of a micro-batch.

    own: tokens of this rank in the window; None (on all ranks) if none were given, and then gradients are not divided.
    Otherwise a collective over the data and sequence axes: DeepSpeed takes means over the first and sums over the
    second. slots: the number of micro-batches that gradients were divided by already.
    """
    if own is None:
        yield
        return
    total = torch.tensor([float(own)], dtype=torch.float64)
    if engine.seq_dp_world_size > 1:
        dist.all_reduce(total, group=engine.seq_data_parallel_group)
    divisor = float(total) / slots or 1.0  # no token at all: every gradient is zero already
    optimizer = engine.optimizer
    if optimizer is engine.basic_optimizer:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        yield
        return
    if isinstance(optimizer, BF16_Optimizer):  # it has no loss scale; its gradients are reduced already
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
        yield
        return
    with old_gradients_kept(optimizer, divisor), scaler.multiplied(optimizer, divisor):
        yield
