"""Checks of the support table that depend on more than one key of the configuration, or on the layout."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import Any

from ds_dynatrain.support.row import Config, Refusal, Target


def needs_compiler(config: Config) -> Refusal | None:
    """Refuse DeepSpeed's own Adam and AdamW (without `torch_adam`) if they cannot be compiled when the job starts."""
    if setting(config, "optimizer.params.torch_adam") or offloads(config):
        return None
    has_ninja = shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None
    missing = "" if has_ninja else "ninja"
    missing = missing if shutil.which("c++") or shutil.which("g++") else "C++ compiler"
    if not missing:
        return None
    return Refusal(
        f"optimizer.params.torch_adam: without it DeepSpeed compiles its own Adam, and there is no {missing} here",
        "set it to true, or install what is missing",
    )


def norm_needs_stage_1_or_2(target: Target) -> Refusal | None:
    """Refuse `compute_grad_norm` false in stages 0 and 3, because DeepSpeed skips the norm only in stages 1 and 2."""
    if target.layout.zero_stage in (1, 2):
        return None
    nearest = target.layout.replace(zero_stage=1 if target.layout.zero_stage == 0 else 2)
    return Refusal("only stages 1 and 2 have this option", f"nearest: {nearest}; or leave the key out")


def unmanaged_overlap(target: Target) -> Refusal | None:
    """Refuse overlap_comm below stage 2 with unmanaged accumulation.

    DeepSpeed itself checks only the initial stage.
    """
    if target.layout.zero_stage > 1 or not setting(target.config, "zero_optimization.overlap_comm"):
        return None
    return Refusal(
        "without it zero_optimization.overlap_comm works only in ZeRO stages 2 and 3",
        f"set overlap_comm to false, or nearest: {target.layout.replace(zero_stage=2)}",
    )


HALF = ("fp16", "float16", "half", "torch.float16")
BRAIN = ("bf16", "bfloat16", "torch.bfloat16")
"""DeepSpeed's names of the two 16-bit types. Every other name counts as fp32 here."""


def accumulates_in_fp32(config: Config) -> Refusal | None:
    """Refuse gradients that are accumulated in a type that is neither fp32 nor that of the weights."""
    gradient = _gradient_type(config)
    if gradient in ("fp32", _weight_type(config)):
        return None
    why = f"gradients of {_weight_type(config)} weights are accumulated in {gradient}, which was not tried"
    return Refusal(why, "use fp32, or leave the key out")


def accumulation_at_stage_0(target: Target) -> Refusal | None:
    """Refuse gradients of a different type from the weights at stage 0, where DeepSpeed has no optimizer for them."""
    weight, gradient = _weight_type(target.config), _gradient_type(target.config)
    if target.layout.zero_stage or weight == gradient:
        return None
    why = f"DeepSpeed cannot accumulate the gradients of {weight} weights in {gradient} at ZeRO stage 0"
    return Refusal(why, f"nearest: {target.layout.replace(zero_stage=1)}")


def autocast_at_stage_3(target: Target) -> Refusal | None:
    """Refuse autocast at stage 3 with persistent parameters.

    ZeRO-3 gathers them in the low-precision type at their first use, and in fp32 after each step.
    """
    zero = target.config.get("zero_optimization") or {}
    names = ("stage3_param_persistence_threshold", "param_persistence_threshold")
    threshold = next((zero[name] for name in names if name in zero), None)
    if target.layout.zero_stage < 3 or threshold == 0:
        return None
    why = "ZeRO-3 gathers persistent parameters in the low type at their first use, and in fp32 after each step"
    return Refusal(why, f"set zero_optimization.{names[0]} to 0, or take {target.layout.replace(zero_stage=2)}")


def _weight_type(config: Config) -> str:
    blocks = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    return next((name for block, name in blocks.items() if setting(config, f"{block}.enabled")), "fp32")


def _gradient_type(config: Config) -> str:
    named = setting(config, "data_types.grad_accum_dtype")
    return _weight_type(config) if named is None else _type_name(named)


def is_low(config: Config) -> bool:
    """Return whether the configuration gives weights a 16-bit type."""
    return _weight_type(config) != "fp32"


def gradients_apart(config: Config) -> str:
    """Return the key that gives gradients a different type from the weights; "" if there is none."""
    keys, weight = ("data_types.grad_accum_dtype", "communication_data_type"), _weight_type(config)
    named = {key: setting(config, key) for key in keys}
    return next((key for key, held in named.items() if held not in (None, "auto") and _type_name(held) != weight), "")


def _type_name(named: object) -> str:
    text = str(named).lower()
    if text.removeprefix("torch.") in ("fp32", "float32", "float"):
        return "fp32"
    return "fp16" if text in HALF else "bf16" if text in BRAIN else text


def needs_offload(config: Config) -> Refusal | None:
    """Refuse Lion without optimizer offload, because only DeepSpeedCPULion's states are known."""
    if offloads(config):
        return None
    return Refusal(
        "optimizer.type 'Lion': its states are known with offload_optimizer only, where it is DeepSpeedCPULion",
        "offload the optimizer to the CPU, or use Adam or AdamW",
    )


def offloads(config: Config) -> bool:
    """Return whether the optimizer's state lies in host memory."""
    return bool(setting(config, "zero_optimization.offload_optimizer.device") == "cpu")


def keeps_pinned_memory(config: Config) -> Refusal | None:
    """Refuse DeepSpeed's own pinned memory, because DeepSpeed frees it with the optimizer, but a switch keeps it."""
    blocks = [setting(config, f"zero_optimization.{name}") or {} for name in ("offload_optimizer", "offload_param")]
    pins = any(block.get("device") == "cpu" and block.get("pin_memory", True) for block in blocks)
    if not pins or os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() != "native":
        return None
    return Refusal(
        "pin_memory: under DS_PIN_MEMORY_BACKEND=native DeepSpeed frees pinned buffers with the optimizer that had "
        "them, and a switch keeps them",
        "unset that variable, or set pin_memory to false",
    )


def scales_gradients(target: Target) -> Refusal | None:
    """Refuse scaled gradients in cases that stages 2 and 3 of DeepSpeed 0.19.8 handle wrongly.

    The keys are `prescale_gradients` and `gradient_predivide_factor`.
    """
    stage = target.layout.zero_stage
    if stage >= 2 and setting(target.config, "zero_optimization.reduce_scatter") is not False:
        return Refusal(
            f"stage {stage} scales gradients before or after their sum only where it reduces whole ones",
            "set zero_optimization.reduce_scatter to false",
        )
    factor = target.config.get("gradient_predivide_factor") or 1.0
    before = target.config.get("prescale_gradients")
    if stage == 3 and factor == target.layout.data != 1 and not before:
        return Refusal(
            f"on as many ranks stage 3 leaves the gradients {factor:g} times too small",
            "use another factor, or another number of ranks",
        )
    return None


def times_stages(target: Target) -> Refusal | None:
    """Refuse pipelines whose passes are timed. DeepSpeed 0.19.8 starts a timer twice on every stage except the last."""
    if target.layout.pipe == 1:
        return None
    return Refusal(
        "with more than one stage DeepSpeed 0.19.8 starts its timer of a backward pass twice, and fails with "
        "'bwd_microstep timer has already been started'",
        "leave the key out, or take pipe=1; engine.balancer has the times of layers",
    )


def setting(config: Config, key: str) -> Any:
    """Return the value of a dotted key; None if the key or one of its sections is missing."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
