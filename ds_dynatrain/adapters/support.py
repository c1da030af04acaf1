"""What a live switch is right for today; everything else is refused by name when the engine is built.

An allow list: a key that is not here was not tried, and an untried key is refused rather than got wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.errors import UnsupportedError

SUPPORTED_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer",
        "scheduler",
        "zero_optimization",
        "bf16",
        "gradient_clipping",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "dataloader_drop_last",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "checkpoint",
        "disable_python_gc",
        "log_level",
    }
)
SUPPORTED_ZERO_KEYS = frozenset(
    {
        "stage",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_gather_16bit_weights_on_model_save",
        "max_live_parameters",
        "max_reuse_distance",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "gather_16bit_weights_on_model_save",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
    }
)
OFF: tuple[object, ...] = (None, False, 0, {})
"""Values that say a feature is not used."""
OFF_FOR_KEY: Mapping[str, object] = {"zero_hpz_partition_size": 1, "gradient_predivide_factor": 1.0}
"""More of them, for single keys: DeepSpeed's own defaults."""


def refuse_unsupported(config: Mapping[str, Any], model: nn.Module, optimizer: Any, mpu: Any) -> None:
    """UnsupportedError, naming the feature, the reason and the way out, for what a switch would get wrong."""
    if get_accelerator().device_name() != "cpu":
        raise UnsupportedError(
            f"accelerator {get_accelerator().device_name()!r}: a live switch is tested on CPU members only; remove the "
            "dynatrain block there, or set DS_ACCELERATOR=cpu"
        )
    for key, value in config.items():
        if key not in SUPPORTED_KEYS and not _is_off(key, value):
            raise UnsupportedError(f"{key}: not supported with a dynatrain block yet; remove the key, or the block")
    zero = config.get("zero_optimization") or {}
    for key, value in zero.items():
        if key not in SUPPORTED_ZERO_KEYS and not _is_off(key, value):
            raise UnsupportedError(
                f"zero_optimization.{key}: not supported with a dynatrain block yet; remove the key, or the block"
            )
    extra = set(config.get("bf16") or {}) - {"enabled"}
    if extra:
        raise UnsupportedError(f"bf16.{min(extra)}: not supported with a dynatrain block yet; keep only `enabled`")
    if isinstance(model, PipelineModule):
        raise UnsupportedError("PipelineModule: the pipe axis cannot change yet; remove the dynatrain block")
    if mpu is not None:
        raise UnsupportedError("mpu: only the data axis can change yet; remove the dynatrain block")
    if optimizer is None and "optimizer" not in config:
        raise UnsupportedError(
            "no optimizer: pass one to initialize, or put an `optimizer` block into the configuration"
        )
    if optimizer is None:
        _refuse_optimizer(config["optimizer"])
    _refuse_model(model)


def _refuse_optimizer(block: Mapping[str, Any]) -> None:
    """Before it is built: DeepSpeed compiles some of them at once."""
    name = str(block.get("type", ""))
    if name.lower() not in ("adam", "adamw"):
        raise UnsupportedError(f"optimizer.type {name!r}: its states are not known; use Adam or AdamW")
    params = block.get("params") or {}
    if not params.get("torch_adam"):
        raise UnsupportedError(
            "optimizer.params.torch_adam: without it DeepSpeed takes its own FusedAdam, whose states are not "
            "supported yet; "
            "set it to true"
        )


def _is_off(key: str, value: object) -> bool:
    if isinstance(value, Mapping) and (value.get("enabled") is False or value.get("device") == "none"):
        return True
    return value in OFF or value == OFF_FOR_KEY.get(key, OFF)


def _refuse_model(model: nn.Module) -> None:
    from deepspeed.moe.layer import MoE

    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise UnsupportedError(f"{name!r} was built under deepspeed.zero.Init; build the model outside of it")
        if parameter.is_meta:
            raise UnsupportedError(f"{name!r} is on the meta device; give the model real parameters")
        if getattr(parameter, "allreduce", True) is False:
            raise UnsupportedError(f"{name!r} is an expert parameter; the expert axis cannot change yet")
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedError(f"{name!r} is {parameter.dtype}; only float32 and bfloat16 are supported yet")
    for name, part in model.named_modules():
        if isinstance(part, MoE):
            raise UnsupportedError(f"{name!r} is a mixture-of-experts layer; the expert axis cannot change yet")
        if isinstance(part, nn.Embedding) and part.sparse:
            raise UnsupportedError(f"{name!r} has sparse gradients; build the embedding with sparse=False")
        if isinstance(part, torch._dynamo.eval_frame.OptimizedModule) or part._compiled_call_impl is not None:
            raise UnsupportedError(
                f"torch.compile: {name or 'the model'!r} is compiled, which is not followed through a switch yet; "
                "pass the plain module"
            )
