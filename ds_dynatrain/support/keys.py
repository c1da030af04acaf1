"""The rows of the support table for the keys of DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ds_dynatrain.support.checks import (
    HALF,
    accumulates_in_fp32,
    accumulation_at_stage_0,
    autocast_at_stage_3,
    keeps_pinned_memory,
    needs_compiler,
    needs_offload,
    norm_needs_stage_1_or_2,
    scales_gradients,
    times_stages,
    unmanaged_overlap,
)
from ds_dynatrain.support.row import NOT_TRIED, Row, refused, works

_SCALED = "at stages 2 and 3 only with zero_optimization.reduce_scatter false"
_GONE = "DeepSpeed has removed this feature and refuses the key itself"
_OTHER = "use AdamW, or another one of this table"
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_ENABLED = ("enabled", False)
_LOW_MASTERS = "masters and moments below fp32 are not moved yet"
_ZERO = "zero_optimization"
_HOST_STATE = "zero_optimization.offload_optimizer"
_HOST_WEIGHTS = "zero_optimization.offload_param"
_DISK = "state on disk is not moved by a switch"
_FOR_DISK = "read only for offloading to NVMe"
_OFF = "set it to false"
_ORDER = "it numbers ranks in a different order than a layout"

BATCHES = (
    *works("", "train_batch_size gradient_clipping dataloader_drop_last disable_allgather communication_data_type"),
    *works("", "train_micro_batch_size_per_gpu", "the largest micro-batch of any world"),
    *works("", "gradient_accumulation_steps", "follows from the layout: leave it out"),
    *works(
        "",
        "managed_gradient_accumulation",
        "if false, call step() once, after the last micro-batch of a global batch (`gradient_accumulation_steps()` "
        "is their number); an earlier step() raises an error",
        off=(None, True),
        at_layout=unmanaged_overlap,
    ),
    *works("", "prescale_gradients", _SCALED, at_layout=scales_gradients),
    *works("", "gradient_predivide_factor", _SCALED, off=(None, 1.0), at_layout=scales_gradients),
    *refused("", "gradient_allreduce_op", "a sum of gradients grows with the world", off=(None, "mean")),
    *works(
        "",
        "seq_parallel_communication_data_type",
        "the type in which gradients are reduced if the sequence axis is above 1; by default fp32",
    ),
)

REPORTS = (
    *works("", "steps_per_print memory_breakdown dump_state log_level disable_python_gc timers"),
    *works(
        "",
        "wall_clock_breakdown",
        "with one pipeline stage; refused with several, where plain DeepSpeed 0.19.8 fails in the first step",
        at_layout=times_stages,
    ),
    *works("", "vocabulary_size", "DeepSpeed only warns if it is not a multiple of 8"),
    *works("timers", "throughput"),
    *works("timers.throughput", "enabled synchronized"),
    *works(
        "",
        "tensorboard wandb csv_monitor",
        "rank 0 writes; one run continues across switches as long as member 0 works",
        switch=_ENABLED,
    ),
    *works("tensorboard", "enabled output_path job_name"),
    *works("wandb", "enabled group team project"),
    *works("csv_monitor", "enabled output_path job_name"),
    *refused("", "comet", switch=_ENABLED, below=True),
    *works("", "comms_logger", switch=_ENABLED),
    *works("comms_logger", "enabled prof_all prof_ops verbose debug"),
    *works("", "flops_profiler", "profiles the world that runs the step; rank 0 writes", switch=_ENABLED),
    *works("flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    *refused("", "autotuning", "it restarts the job with other settings", switch=_ENABLED, below=True),
)

CHECKPOINTS = (
    *works(
        "",
        "checkpoint",
        "save_checkpoint and load_checkpoint work between switches",
    ),
    *works("checkpoint", "tag_validation checkpoint_serialization use_node_local_storage"),
    *refused("checkpoint", "load_universal"),
    *refused("checkpoint", "writer", below=True),
    *refused(
        "checkpoint", "parallel_write", "it changes how pipelines write checkpoints, which was not tried", below=True
    ),
    *refused("", "datastates_ckpt", off=(False,), below=True),
)

REMOVED = (
    *refused(
        "",
        "nebula compression_training amp quantize_training sparse_gradients eigenvalue "
        "sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop",
        _GONE,
        off=(),
        below=True,
    ),
    *refused(
        "zero_optimization",
        "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
        _GONE,
        off=(),
        below=True,
    ),
)

OPTIMIZERS = (
    *works("", "optimizer zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    *works(
        "optimizer",
        "type",
        "unless its params have torch_adam, DeepSpeed compiles its own FusedAdam at the start, which needs a C++ "
        "compiler",
        values=("Adam", "AdamW"),
        at_start=needs_compiler,
    ),
    *works(
        "optimizer",
        "type",
        "only with offload_optimizer",
        values=("Lion",),
        at_start=needs_offload,
    ),
    *works(
        "optimizer",
        "type",
        "with ZeRO, DeepSpeed requires zero_allow_untested_optimizer",
        values=("SGD", "RMSprop", "NAdam", "RAdam", "Adamax"),
    ),
    *works(
        "optimizer",
        "type",
        "only at ZeRO stage 0; in higher stages DeepSpeed replaces it with a new one",
        values=("Adagrad",),
    ),
    *works(
        "optimizer",
        "type",
        "stage 0 only in fp32, stage 3 only with reduce_scatter false; no offload, no tensor axis, gradients in the "
        "weights' type",
        values=("Muon",),
    ),
    *refused("optimizer", "type", NOT_TRIED, _OTHER, values=("MuAdam", "MuAdamW", "MuSGD"), off=()),
    *refused(
        "optimizer",
        "type",
        "its states are not one value per element",
        _OTHER,
        values=("Adafactor", "Shampoo", "LBFGS"),
        off=(),
    ),
    *refused("optimizer", "type", "it needs sparse gradients", _OTHER, values=("SparseAdam",), off=()),
    *refused(
        "optimizer",
        "type",
        "it sends messages of its own, over groups that a switch does not know",
        _OTHER,
        values=("OneBitAdam", "ZeroOneAdam", "OneBitLamb"),
        off=(),
    ),
    *refused("optimizer", "type", "it scales a step by norms of whole parameters", _OTHER, values=("Lamb",), off=()),
    *refused(
        "optimizer",
        "type",
        "its states are unknown",
        "use AdamW, or register its class (docs/optimizers.md) and pass an optimizer to initialize",
        off=(),
    ),
    *works("optimizer", "params", "the arguments of the class", below=True),
    *refused("optimizer", "legacy_fusion"),
)

SCHEDULERS = (
    *works("", "scheduler"),
    *works("scheduler", "type", values=_SCHEDULERS),
    *works("scheduler", "type", "a class of torch.optim.lr_scheduler"),
    *works("scheduler", "params", "the arguments of the class", below=True),
)

PRECISION = (
    *works("", "bf16", switch=_ENABLED),
    *works("bf16", "enabled"),
    *works("bf16", "immediate_grad_update", "only BF16_Optimizer (stage 1) reads it"),
    *works("bf16", "check_grad_overflow", "only stages 1 and 2 read it; the other stages always check"),
    *refused("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", _LOW_MASTERS),
    *refused("", "bfloat16", "DeepSpeed's old name of bf16", "call it bf16", switch=_ENABLED, below=True),
    *works("", "fp16", "the loss is also scaled at stage 0, where DeepSpeed 0.19.8 does not scale it", switch=_ENABLED),
    *works("fp16", "enabled auto_cast loss_scale initial_scale_power loss_scale_window min_loss_scale"),
    *works(
        "fp16",
        "hysteresis consecutive_hysteresis",
        "stage 0 has no hysteresis; the count is kept until a switch to another stage",
    ),
    *refused("fp16", "fp16_master_weights_and_grads", _LOW_MASTERS),
    *works(
        "",
        "torch_autocast",
        "for an fp32 model; at stage 3 only with a parameter persistence threshold of 0",
        switch=_ENABLED,
        at_layout=autocast_at_stage_3,
    ),
    *works("torch_autocast", "enabled lower_precision_safe_modules"),
    *refused(
        "torch_autocast",
        "dtype",
        "with it DeepSpeed also uses torch's gradient scaler, which a switch does not carry over",
        "use bfloat16, or the fp16 block in place of autocast",
        values=HALF,
    ),
    *works("torch_autocast", "dtype", "bfloat16"),
    *works("", "data_types"),
    *works(
        "data_types",
        "grad_accum_dtype",
        "fp32, except at stage 0 with 16-bit weights; with bf16 at stage 1, DeepSpeed then uses BF16_Optimizer",
        at_start=accumulates_in_fp32,
        at_layout=accumulation_at_stage_0,
    ),
    *works("data_types", "param_dtype", "the type of the bf16 or fp16 block"),
    *works("data_types", "buffer_dtype"),
    *works("data_types", "keep_in_fp32_modules", "it affects only buffers", off=("auto",)),
)

ZERO = (
    *works("", _ZERO),
    *works(_ZERO, "stage", "the stage at the start, unless dynatrain.layout names one"),
    *works(
        _ZERO,
        "sub_group_size param_persistence_threshold stage3_param_persistence_threshold contiguous_gradients "
        "reduce_scatter overlap_comm reduce_bucket_size allgather_partitions allgather_bucket_size "
        "use_multi_rank_bucket_allreduce ignore_unused_parameters load_from_fp32_weights max_live_parameters "
        "max_reuse_distance prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_prefetch_bucket_size model_persistence_threshold stage3_model_persistence_threshold "
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save memory_efficient_linear "
        "override_module_apply use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params "
        "allgather_sequential stage3_allgather_sequential log_trace_cache_warnings enable_sanity_checks "
        "leaf_module parameter_alignment",
    ),
    *works(f"{_ZERO}.leaf_module", "classes names name_suffixes"),
    *refused(
        _ZERO,
        "stage3_gather_fp16_weights_on_model_save",
        "an old name",
        "write stage3_gather_16bit_weights_on_model_save",
    ),
    *works(
        _ZERO,
        "compute_grad_norm",
        "if false, a switch to stage 0 or 3 is refused, because only stages 1 and 2 have this option",
        off=(None, True),
        at_layout=norm_needs_stage_1_or_2,
    ),
    *refused(_ZERO, "elastic_checkpoint legacy_stage1"),
    *works(
        _ZERO,
        "round_robin_gradients",
        "a change of data reorders the flat buffers, which sends more bytes; `_hp_mapping`, wrong in plain DeepSpeed "
        "0.19.8, is corrected",
    ),
    *refused(
        _ZERO,
        "zero_hpz_partition_size",
        "hpZ gathers weights within groups of ranks, which a switch cannot rebuild yet",
        "leave it at 1",
        off=(None, 0, 1),
    ),
    *refused(
        _ZERO,
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
        "ZeRO++ quantizes with CUDA operators, which could not be tried",
        _OFF,
    ),
    *refused(_ZERO, "module_granularity_threshold stage3_module_granularity_threshold", off=(None, 0)),
    *refused(_ZERO, "pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory"),
)

OFFLOAD = (
    *works(
        _ZERO,
        "offload_optimizer",
        "offloads in stages 1 to 3; stage 0 only uses the CPU optimizer. A switch also moves the last gradients",
        switch=("device", "none"),
        at_start=keeps_pinned_memory,
    ),
    *works(_HOST_STATE, "device", values=("cpu",)),
    *refused(_HOST_STATE, "device", _DISK, "use cpu", off=(None, "none")),
    *works(_HOST_STATE, "pin_memory"),
    *works(_HOST_STATE, "fast_init nvme_path buffer_count pipeline_read pipeline_write", _FOR_DISK),
    *works(_HOST_STATE, "cpuadam_cores_perc", "read only by SuperOffload"),
    *refused(
        _HOST_STATE,
        "ratio",
        "Twin-Flow keeps a second optimizer for some of ZeRO-3's sub-groups, whose states a switch does not move",
        "leave it at 1.0",
        off=(None, 1.0),
    ),
    *refused(
        _HOST_STATE,
        "super_offload",
        "its optimizer runs in a separate process, whose state a switch does not move",
        _OFF,
    ),
    *works(
        _ZERO,
        "offload_param",
        "only at stage 3; DeepSpeed ignores it in other stages",
        switch=("device", "none"),
        at_start=keeps_pinned_memory,
    ),
    *works(_HOST_WEIGHTS, "device", values=("cpu",)),
    *refused(_HOST_WEIGHTS, "device", _DISK, "use cpu", off=(None, "none")),
    *works(_HOST_WEIGHTS, "pin_memory"),
    *works(_HOST_WEIGHTS, "max_in_cpu nvme_path buffer_count buffer_size", _FOR_DISK),
    *refused(
        _ZERO,
        "cpu_offload cpu_offload_param cpu_offload_use_pin_memory",
        "an old name",
        "use the blocks offload_optimizer and offload_param",
    ),
    *refused(
        _ZERO, "zenflow", "it updates parts of the masters at different steps, while training continues", below=True
    ),
    *works("", "aio", _FOR_DISK, below=True),
)

FEATURES = (
    *works("", "activation_checkpointing", "read only by deepspeed.checkpointing.configure"),
    *works(
        "activation_checkpointing",
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints "
        "synchronize_checkpoint_boundary profile",
    ),
    *refused(
        "",
        "compile",
        "DeepCompile builds one layout's communication into the graph",
        "leave it out and call engine.compile(), which is torch.compile",
        switch=("deepcompile", False),
        below=True,
    ),
    *works("", "data_efficiency"),
    *works("data_efficiency", "enabled seed data_routing data_sampling"),
    *works("data_efficiency.data_routing", "enabled"),
    *works(
        "data_efficiency.data_routing",
        "random_ltd",
        "its schedule is carried over; call convert_to_random_ltd on every process. DeepSpeed has kernels only for "
        "CUDA",
        below=True,
    ),
    *works("data_efficiency.data_sampling", "enabled num_epochs num_workers pin_memory"),
    *works(
        "data_efficiency.data_sampling",
        "curriculum_learning",
        "every process reads the index files, and keeps its own clusters below data_cluster_path until it exits",
        switch=_ENABLED,
        below=True,
    ),
    *refused(
        "data_efficiency.data_sampling",
        "dynamic_batching",
        "its batches have no fixed size",
        "leave it out",
        switch=_ENABLED,
        below=True,
    ),
    *refused("", "hybrid_engine", switch=_ENABLED, below=True),
    *refused("", "weight_quantization", below=True),
)

PARALLELISM = (
    *works(
        "",
        "pipeline",
        "`partition`: the partition_method for numbers of stages other than the script's, or "
        '["profile"](balance.md#boundaries-of-the-start) for all; activation_checkpoint_interval, use_reentrant: '
        "as in DeepSpeed; other keys: no effect",
        below=True,
    ),
    *works("", "tensor_parallel"),
    *works(
        "tensor_parallel",
        "autotp_size",
        "the size of this axis at the start, if dynatrain.layout does not name it; see [axes](axes.md)",
    ),
    *works(
        "tensor_parallel",
        "preset_model tp_overlap_comm vocab_parallel_lm_head",
        "options of AutoTP, the same in every layout; some of them were tried",
    ),
    *works(
        "tensor_parallel",
        "partition_config",
        "rules for AutoTP, the same in every layout; refused if they cut a parameter that AutoTP does not describe",
        below=True,
    ),
    *refused(
        "tensor_parallel",
        "dtype injection_policy_tuple keep_module_on_host kernel_inject replace_with_kernel_inject "
        "vocab_parallel_ce_backend",
        off=(None, False, "torch"),
    ),
    *refused("tensor_parallel", "tp tensor_parallel", off=(None, {}), below=True),
    *works("", "expert_parallel", switch=_ENABLED),
    *works("expert_parallel", "enabled"),
    *works(
        "expert_parallel",
        "autoep_size",
        "the size of this axis at the start, if dynatrain.layout does not name it; see [axes](axes.md)",
    ),
    *works(
        "expert_parallel",
        "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern use_grouped_mm "
        "disable_triton_grouped_mm route_norm route_scale score_apply combine_impl gate_up_impl num_expert_groups "
        "num_limited_groups score_func top_k routed_scaling_factor expert_activation validate_folding_routing",
        "options of AutoEP's layers, the same in every layout; some of them were tried",
        off=(None, False, {}, "auto"),
    ),
    *refused(
        "expert_parallel",
        "comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank row_weighting_impl async_split_plan",
        "it is for accelerators on which no switch was tested",
        "leave it out",
        off=(None, False, 0, 4, 12, "comm", "auto", "eager"),
    ),
    *refused(
        "expert_parallel",
        "expert_tensor_parallel_size",
        "DeepSpeed itself accepts only 1",
        "leave it out",
        off=(None, False, 1),
    ),
    *refused("expert_parallel", "load_balance_coeff", "DeepSpeed itself accepts no value", "leave it out", off=(None,)),
    *works(
        "",
        "sequence_parallel_size",
        "the size of this axis at the start, if dynatrain.layout does not name it; see [axes](axes.md)",
        off=(None, 1),
    ),
    *refused(
        "",
        "data_parallel_size",
        "with sequence_parallel_size, ZeRO would reduce only over data ranks, and parameters of sequence ranks would "
        "drift apart",
        "leave it out and pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        off=(None,),
    ),
    *refused("", "use_data_before_expert_parallelism", _ORDER),
)

CONFIG_TABLES: Mapping[str, tuple[Row, ...]] = {
    "batches": BATCHES,
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "precision": PRECISION,
    "zero": ZERO,
    "offload": OFFLOAD,
    "features": FEATURES,
    "parallelism": PARALLELISM,
    "reports": REPORTS,
    "checkpoints": CHECKPOINTS,
    "removed": REMOVED,
}
"""The rows of DeepSpeed's configuration keys, keyed by the name of their table in the docs."""
