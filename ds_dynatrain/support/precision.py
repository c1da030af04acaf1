"""Rows of element types: bf16, fp16, autocast, and the types of gradients, parameters and buffers."""

from __future__ import annotations

from ds_dynatrain.support.row import refused, works

_HERE = "tests/engine/test_precision.py"
_ENABLED = ("enabled", False)

PRECISION = (
    *works("", "bf16", proof="tests/engine/test_matrix.py", switch=("enabled", False)),
    *works("bf16", "enabled"),
    *refused("bf16", "immediate_grad_update", instead="keep only `enabled`"),
    *refused("bf16", "check_grad_overflow", instead="keep only `enabled`", off=(None, True)),
    *refused("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", instead="keep only `enabled`"),
    *refused("", "bfloat16", "DeepSpeed's old name of bf16", "call it bf16", switch=("enabled", False), below=True),
    *works("", "fp16", "at stage 0 the loss is scaled too, which DeepSpeed 0.19.8 forgets", _HERE, switch=_ENABLED),
    *works("fp16", "enabled auto_cast"),
    *works("fp16", "loss_scale initial_scale_power loss_scale_window min_loss_scale", proof=_HERE),
    *works("fp16", "hysteresis consecutive_hysteresis", "stage 0 has none: the count waits until it is left", _HERE),
    *refused("fp16", "fp16_master_weights_and_grads", "masters and gradients below fp32 are not moved yet"),
    *refused("", "torch_autocast", switch=("enabled", False), below=True),
    *works("", "data_types"),
    *refused("data_types", "grad_accum_dtype param_dtype buffer_dtype"),
    *refused("data_types", "keep_in_fp32_modules", off=("auto",)),
)
