"""The loss scale of fp16, under the same field names for DeepSpeed's three loss scalers, so that a switch can transfer
it.

A field that the current optimizer does not have (stage 0 has no hysteresis, a plain torch optimizer no scaler) is kept
on the engine, and restored when a later layout has it.

Gradients weighted by token counts are divided at the point where DeepSpeed divides by its loss scale, before clipping.
If token counts differ, the mean of the micro-batches' means is not the mean over all tokens. So each micro-batch's mean
loss is multiplied by its own count. Before the step, the accumulated gradient, which DeepSpeed has divided by the
number of micro-batches, is divided by the mean number of tokens per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaleConfig, LossScalerBase
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_dynatrain.adapters.zero.zero_stage import keeps_gradients

State = dict[str, Any]
"""A map from each field of the loss scale to its value: a number, a boolean or None."""

SCALE = "scale"
DYNAMIC = {
    SCALE: "cur_scale",
    "iteration": "cur_iter",
    "last_overflow": "last_overflow_iter",
    "hysteresis": "cur_hysteresis",
    "factor": "scale_factor",
    "window": "scale_window",
    "least_scale": "min_scale",
    "hysteresis_of_start": "delayed_shift",
    "hysteresis_refills": "consecutive_hysteresis",
}
"""Fields of ZeRO's DynamicLossScaler (stages 1 to 3). LossScaleConfig (stage 0) has some of them, one under another
name."""
STATIC = {SCALE: "cur_scale"}
"""Fields of any scaler whose scale is fixed."""
OF_OPTIMIZER = {
    "overflow": "overflow",
    "custom": "custom_loss_scaler",
    "custom_scale": "external_loss_scale",
}
"""Fields of the optimizer itself: whether the last step overflowed, and the scale of `override_loss_scale`."""
OF_BF16_OPTIMIZER = {"overflow": "overflow"}
"""Fields of BF16_Optimizer. It applies a custom scale but never divides by it, so that scale is kept on the engine."""


def places(optimizer: Any) -> dict[str, tuple[Any, str]]:
    """Return where an optimizer keeps its loss-scale fields, as a map from field to (object, name of the attribute)."""
    if isinstance(optimizer, BF16_Optimizer):
        names: Mapping[str, str] = OF_BF16_OPTIMIZER
    else:
        names = OF_OPTIMIZER if hasattr(optimizer, "custom_loss_scaler") else {}
    found = {field: (optimizer, name) for field, name in names.items()}
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    if isinstance(scaler, LossScalerBase | LossScaleConfig):
        own = DYNAMIC | ({"least_scale": "min_loss_scale"} if isinstance(scaler, LossScaleConfig) else {})
        is_dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
        names = own if is_dynamic else STATIC
        found |= {field: (scaler, name) for field, name in names.items() if hasattr(scaler, name)}
    return found


def first_state(engine: Any) -> State:
    """Return the value of every loss-scale field at the start of a job, according to the engine's configuration."""
    weight = engine.get_data_types()[0]
    scaler = CreateLossScaler(
        weight, engine.loss_scale(), engine.dynamic_loss_scale(), dict(engine.dynamic_loss_scale_args())
    )
    names = DYNAMIC if isinstance(scaler, DynamicLossScaler) else STATIC
    fields = {field: getattr(scaler, name) for field, name in names.items()}
    return {**fields, "overflow": False, "custom": False, "custom_scale": None}


def taken_from(state: State, fields: Mapping[str, Any]) -> State:
    """Return `state`, updated with the loss scale of a DeepSpeed checkpoint.

    fields: attributes of the checkpoint's scaler, of any class, keyed by DeepSpeed's names.

    The state is returned unchanged if one of the two scales is fixed and the other is dynamic.
    """
    was_dynamic = bool(fields.get("dynamic", fields.get("dynamic_loss_scale", False)))
    if was_dynamic != ("iteration" in state):
        return state
    names = DYNAMIC if was_dynamic else STATIC
    found = {field: fields[name] for field, name in names.items() if field in state and name in fields}
    return {**state, **{field: plain(value) for field, value in found.items()}}


def plain(value: Any) -> Any:
    """Return a field as a number, even if DeepSpeed keeps it as a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# ---- stage 0 -----------------------------------------------------------------------------------------------------


def forgotten_scale(engine: Any) -> float:
    """Return the factor by which DeepSpeed fails to multiply the loss: the loss scale, or 1 if nothing is missing.

    In DeepSpeed 0.19.8, `engine.backward` scales the loss only for ZeRO optimizers, but at stage 0 in fp16
    FP16_UnfusedOptimizer and FP16_Optimizer still divide gradients by the scale. In a DeepSpeed without `engine.scale`,
    the optimizers do both.
    """
    settings = getattr(engine.optimizer, "loss_scale_config", None)
    if settings is None or not settings.use_grad_scaling or isinstance(engine.optimizer, ZeROOptimizer):
        return 1.0
    return float(settings.cur_scale) if hasattr(type(engine), "scale") else 1.0


@contextmanager
def true_norm(engine: Any) -> Iterator[None]:
    """Context manager in which a step of FP16_UnfusedOptimizer reports the norm of the unscaled gradients.

    All other optimizers do so. By itself this one takes the norm before it divides the gradients by the loss scale (and
    by the number of tokens).
    """
    optimizer = engine.optimizer
    divisor = float(optimizer.loss_scale_config.cur_scale) if isinstance(optimizer, FP16_UnfusedOptimizer) else 1.0
    yield
    if divisor != 1.0:
        optimizer._global_grad_norm = engine._global_grad_norm = optimizer._global_grad_norm / divisor


# ---- stage 3 -----------------------------------------------------------------------------------------------------


@contextmanager
def norm_before_growth(engine: Any) -> Iterator[None]:
    """Context manager in which stage 3's step divides the norm that it reports by the loss scale of the same step.

    At stage 3, DeepSpeed 0.19.8 divides the norm by the loss scale of the next step, which differs if the scale has
    just grown. Stages 1 and 2 use that of the same step.
    """
    optimizer = engine.optimizer
    before = float(optimizer.loss_scale)
    yield
    after = float(optimizer.loss_scale)
    if after > before and isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._global_grad_norm = engine._global_grad_norm = optimizer._global_grad_norm * (after / before)


# ---- token weights -----------------------------------------------------------------------------------------------


@contextmanager
def divided_by_tokens(engine: Any, own: int | None, slots: int) -> Iterator[None]:
    """Context manager in which the optimizer's step divides gradients by the mean number of tokens per micro-batch.

    own: number of this rank's tokens in the window; None (on all ranks) if no counts were given, in which case
        gradients are not divided.
    slots: number of micro-batches, by which the gradients are already divided.

    With counts, this is a collective over the data and sequence axes, because DeepSpeed averages over data ranks and
    sums over sequence ranks.
    """
    if own is None:
        yield
        return
    total = torch.tensor([float(own)], dtype=torch.float64)
    if engine.seq_dp_world_size > 1:
        dist.all_reduce(total, group=engine.seq_data_parallel_group)
    divisor = float(total) / slots or 1.0  # without any token all gradients are zero already
    optimizer = engine.optimizer
    if optimizer is engine.basic_optimizer:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        yield
        return
    if isinstance(optimizer, BF16_Optimizer):  # no loss scale, and gradients already reduced
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
        yield
        return
    with old_gradients_kept(optimizer, divisor), multiplied(optimizer, divisor):
        yield


@contextmanager
def old_gradients_kept(zero: Any, divisor: float) -> Iterator[None]:
    """Context manager in which the optimizer's step divides new gradients by `divisor`, but not those of earlier steps.

    Gradients from earlier steps were divided when they were new. DeepSpeed records a norm (`norm_for_param_grads`) for
    each new gradient; a parameter without a recorded norm has an old gradient.
    """
    if not keeps_gradients(zero):
        yield
        return
    is_flat = hasattr(zero, "params_in_partition")
    groups = zero.params_in_partition if is_flat else zero.fp16_groups
    masters = zero.single_partition_of_fp32_groups if is_flat else zero.fp32_partitioned_groups_flat
    numbers = [zero.get_param_id(parameter) for group in groups for parameter in group]
    places = [zero.grad_position[number] for number in numbers if number not in zero.norm_for_param_grads]
    left = [masters[place[0]].grad.narrow(0, place[-2], place[-1]) for place in places]
    for gradient in left:
        gradient.mul_(divisor)
    try:
        yield
    finally:
        if getattr(zero, "overflow", False):  # the step was skipped
            for gradient in left:
                gradient.div_(divisor)


@contextmanager
def multiplied(optimizer: Any, factor: float) -> Iterator[None]:
    """Context manager in which the optimizer also divides its gradients by `factor`, without changing the loss scale.

    The scaler still uses the true scale to judge each step, because growth, minimum and overflow refer to it.
    """
    holder, name = getattr(optimizer, "loss_scale_config", None) or optimizer.loss_scaler, "cur_scale"
    if not hasattr(optimizer, "loss_scale_config") and optimizer.custom_loss_scaler:
        holder, name = optimizer, "external_loss_scale"
    true = getattr(holder, name)
    own: Callable[[bool], object] = optimizer._update_scale

    def update(overflow: bool = False) -> None:
        nonlocal true
        setattr(holder, name, true)
        own(overflow)
        true = getattr(holder, name)
        setattr(holder, name, true * factor)

    setattr(holder, name, true * factor)
    optimizer._update_scale = update
    try:
        yield
    finally:
        del optimizer._update_scale
        setattr(holder, name, true)
