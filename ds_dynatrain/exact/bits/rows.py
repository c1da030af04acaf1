"""The rows on exact jobs (`dynatrain.exact`) in the table of features.

`TRIED` and `TRIED_VALUES` are the keys of DeepSpeed's configuration that were tried in exact jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_dynatrain.support.row import Row, Verdict

EXACT_STAGES = (1, 2, 3)
"""The ZeRO stages that an exact job may have."""
TRIED: Mapping[str, str] = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        dataloader_drop_last steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level
        disable_python_gc zero_allow_untested_optimizer data_types
    """,
    "pipeline": "stages partition activation_checkpoint_interval use_reentrant",
    "optimizer": "type params",
    "scheduler": "type params",
    "bf16": "enabled check_grad_overflow",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
    "activation_checkpointing": """
        partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints
        synchronize_checkpoint_boundary profile
    """,
    "zero_optimization": """
        stage reduce_bucket_size allgather_bucket_size allgather_partitions contiguous_gradients
        round_robin_gradients use_multi_rank_bucket_allreduce sub_group_size
        stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_max_live_parameters
        stage3_max_reuse_distance
    """,
}
"""Sections and keys of DeepSpeed's configuration for which every value was tried, or makes no difference."""
TRIED_VALUES: Mapping[str, object] = {
    "data_types.grad_accum_dtype": "fp32",
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.memory_efficient_linear": False,
}
"""Other keys, for which only this value was tried."""
_OPEN = ("optimizer.params.", "scheduler.params.")
"""Sections in which every key is allowed."""


def _start(name: str, why: str, instead: str) -> Row:
    return Row(f"exact: {name}", Verdict.AT_START, why, instead)


ROWS = (
    Row(
        "exact",
        Verdict.NOTE,
        "same bits on CPUs for all numbers of data ranks (ZeRO 1 to 3; fp32, bf16) and pipeline stages (ZeRO 1; "
        "fp32): [exact](exact.md)",
    ),
    Row(
        "exact: a layout",
        Verdict.AT_SWITCH,
        "an exact job has data ranks at ZeRO stages 1 to 3, or pipelines at ZeRO stage 1",
        "leave expert, tensor, sequence and shares out",
    ),
    Row(
        "exact: a smaller last leaf",
        Verdict.AT_START,
        "pipeline stages send buffers of a fixed size",
        "choose a train_batch_size that train_micro_batch_size_per_gpu divides",
    ),
    _start(
        "a pipeline of 16 bits",
        "it was not tried yet",
        "train it in fp32, or leave dynatrain.exact out",
    ),
    _start(
        "fp16",
        "DeepSpeed has no fp16 on this processor, and exact jobs run only on CPUs so far",
        "train in bf16 or fp32, or leave dynatrain.exact out",
    ),
    _start(
        "reentrant checkpointing in a pipeline",
        "it computes no gradients in a segment whose input needs none, and segments begin where stages begin",
        'set "pipeline": {"use_reentrant": false}',
    ),
    _start(
        "several gradients between layers",
        "a stage runs a separate backward pass for each tensor that it passes on",
        "pass one floating-point tensor (and integers), or merge the layers",
    ),
    _start(
        "a key that was not tried",
        "it was not measured whether results stay bit-equal with it",
        "leave the key out, or dynatrain.exact",
    ),
    _start(
        "a key of the dynatrain block",
        "it was not tried in an exact job",
        "leave it or dynatrain.exact out",
    ),
    _start(
        "a model",
        "its layers send messages of their own, or have shapes that depend on the number of ranks",
        "leave dynatrain.exact out",
    ),
    _start(
        "BatchNorm",
        "its statistics depend on each rank's own micro-batches",
        "use a norm over features, such as LayerNorm, or leave dynatrain.exact out",
    ),
    _start(
        "a buffer that changes",
        "a forward pass changes it according to its rank's own micro-batches",
        "keep only integer counts in buffers, or leave dynatrain.exact out",
    ),
    _start(
        "an optimizer",
        "an update may depend on the element's position",
        "use torch's own without `fused`, or register it with placeless=True if it does not",
    ),
    _start(
        "torch.compile",
        "it compiles again in each world, and may produce different kernels",
        "leave it or dynatrain.exact out",
    ),
    _start(
        "an accelerator",
        "it was not measured whether its kernels give the same bits",
        "set DS_ACCELERATOR=cpu, or leave dynatrain.exact out",
    ),
    _start(
        "MKL_CBWR",
        "without it, MKL's rounding depends on the alignment of memory",
        "set MKL_CBWR=COMPATIBLE (or AVX2, AVX512 if all processors have it) before processes start",
    ),
    _start(
        "a micro-batch that is no leaf",
        "only the micro-batches of engine.loader have the same samples in every world",
        "loop over that loader, and call backward and step once for each micro-batch",
    ),
    _start(
        "a loss that is divided",
        "exact jobs multiply each micro-batch's mean loss by its share, and allow no other factor",
        "pass the micro-batch's mean to engine.backward(loss, tokens=n)",
    ),
    _start(
        "a gradient in several parts",
        "a parameter got a second gradient in a backward pass after its first was sent",
        "use torch.utils.checkpoint with use_reentrant=False, or ZeRO stage 1",
    ),
)


def refuse_inexact(key: str, value: object, is_off: bool) -> None:
    """Raise UnsupportedError if a key of DeepSpeed's configuration is on and was not tried in an exact job."""
    tried = TRIED_VALUES.get(key)
    is_tried_value = tried is not None and tried == value and type(tried) is type(value)
    section, _, name = key.rpartition(".")
    is_tried_key = key in TRIED or name in TRIED.get(section, "").split()
    if not (is_off or is_tried_key or is_tried_value or key.startswith(_OPEN)):
        raise usage("exact: a key that was not tried").error(f"exact: {key}")


def usage(name: str) -> Row:
    """Return the row with this name. Raises KeyError if there is none."""
    return {row.key: row for row in ROWS}[name]
