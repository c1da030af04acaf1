"""Rows of element types: bf16, fp16, autocast, and the types of gradients, parameters and buffers."""

from __future__ import annotations

from ds_dynatrain.support.checks import HALF, accumulates_in_fp32, accumulation_at_stage_0, autocast_at_stage_3
from ds_dynatrain.support.row import Row, Verdict, refused, works

_HERE = "tests/engine/test_precision.py"
_ENABLED = ("enabled", False)
_LOW_MASTERS = "masters and moments below fp32 are not moved yet"

PRECISION = (
    *works("", "bf16", proof="tests/engine/test_matrix.py", switch=("enabled", False)),
    *works("bf16", "enabled"),
    *works("bf16", "immediate_grad_update", "BF16_Optimizer (stage 1) alone asks for it", proof=_HERE),
    *works("bf16", "check_grad_overflow", "stages 1 and 2 alone ask for it, the others always look", proof=_HERE),
    *refused("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", _LOW_MASTERS),
    *refused("", "bfloat16", "DeepSpeed's old name of bf16", "call it bf16", switch=("enabled", False), below=True),
    *works("", "fp16", "at stage 0 the loss is scaled too, which DeepSpeed 0.19.8 forgets", _HERE, switch=_ENABLED),
    *works("fp16", "enabled auto_cast"),
    *works("fp16", "loss_scale initial_scale_power loss_scale_window min_loss_scale", proof=_HERE),
    *works("fp16", "hysteresis consecutive_hysteresis", "stage 0 has none: the count waits until it is left", _HERE),
    *refused("fp16", "fp16_master_weights_and_grads", _LOW_MASTERS),
    *works(
        "",
        "torch_autocast",
        "of a fp32 model; at stage 3 with a persistence threshold of 0",
        _HERE,
        switch=_ENABLED,
        at_layout=autocast_at_stage_3,
    ),
    *works("torch_autocast", "enabled lower_precision_safe_modules", proof=_HERE),
    Row(
        "torch_autocast.dtype",
        Verdict.AT_START,
        "DeepSpeed keeps a gradient scaler of torch's there, apart from its own, which is not carried",
        "take bfloat16, or the fp16 block instead of autocast",
        values=HALF,
    ),
    *works("torch_autocast", "dtype", "bfloat16", _HERE),
    *works("", "data_types"),
    Row(
        "data_types.grad_accum_dtype",
        Verdict.NOTE,
        "fp32; not at stage 0 with low weights. BF16_Optimizer is what DeepSpeed takes with bf16 at stage 1",
        proof=_HERE,
        at_start=accumulates_in_fp32,
        at_layout=accumulation_at_stage_0,
    ),
    *works("data_types", "param_dtype", "that of the bf16 or fp16 block"),
    *works("data_types", "buffer_dtype", proof=_HERE),
    *works("data_types", "keep_in_fp32_modules", "it is about buffers alone", _HERE, off=("auto",)),
)
