"""Rows of `zero_optimization` and of what belongs to it."""

from __future__ import annotations

from ds_dynatrain.support.checks import keeps_pinned_memory, norm_needs_stage_1_or_2
from ds_dynatrain.support.row import refused, works

_MATRIX = "tests/engine/test_matrix.py"
_FLAT = "tests/engine/test_flat_orders.py"
_SETTINGS = "tests/engine/test_settings.py"
_ZERO = "zero_optimization"
_PROOF = "tests/engine/test_offload.py"
_HOST_STATE = "zero_optimization.offload_optimizer"
_HOST_WEIGHTS = "zero_optimization.offload_param"
_DISK = "state on disk is not moved by a switch"
_FOR_DISK = "only read where something is offloaded to NVMe"
_OFF = "set it to false"

ZERO = (
    *works("", _ZERO, proof=_MATRIX),
    *works(_ZERO, "stage", "the stage of the start, unless dynatrain.layout has one", _MATRIX),
    *works(_ZERO, "sub_group_size param_persistence_threshold stage3_param_persistence_threshold", proof=_MATRIX),
    *works(_ZERO, "contiguous_gradients reduce_scatter overlap_comm", proof="tests/engine/test_reductions.py"),
    *works(_ZERO, "reduce_bucket_size", proof=_SETTINGS),
    *works(_ZERO, "allgather_partitions allgather_bucket_size use_multi_rank_bucket_allreduce", proof=_SETTINGS),
    *works(_ZERO, "ignore_unused_parameters load_from_fp32_weights", proof=_SETTINGS),
    *works(_ZERO, "max_live_parameters max_reuse_distance prefetch_bucket_size", proof=_SETTINGS),
    *works(_ZERO, "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size", proof=_SETTINGS),
    *works(_ZERO, "model_persistence_threshold stage3_model_persistence_threshold", proof=_SETTINGS),
    *works(_ZERO, "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save", proof=_SETTINGS),
    *works(_ZERO, "memory_efficient_linear override_module_apply", proof=_SETTINGS),
    *works(_ZERO, "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params", proof=_SETTINGS),
    *works(_ZERO, "allgather_sequential stage3_allgather_sequential", proof=_SETTINGS),
    *works(_ZERO, "log_trace_cache_warnings enable_sanity_checks", proof=_SETTINGS),
    *works(_ZERO, "leaf_module", proof=_SETTINGS),
    *works(f"{_ZERO}.leaf_module", "classes names name_suffixes", proof=_SETTINGS),
    *refused(_ZERO, "stage3_gather_fp16_weights_on_model_save", "an old name", "write 16bit for fp16"),
    *works(
        _ZERO,
        "compute_grad_norm",
        "false: a switch to stage 0 or 3 is refused, DeepSpeed has it in stages 1 and 2",
        _SETTINGS,
        off=(None, True),
        at_layout=norm_needs_stage_1_or_2,
    ),
    *refused(_ZERO, "elastic_checkpoint legacy_stage1"),
    *works(
        _ZERO,
        "round_robin_gradients",
        "the order of the flat buffers depends on the data axis, so a change of it sends some more bytes; "
        "`_hp_mapping` is set right, which stock 0.19.8 gets wrong",
        _FLAT,
    ),
    *works(_ZERO, "parameter_alignment", proof=_FLAT),
    *refused(
        _ZERO,
        "zero_hpz_partition_size",
        "hpZ gathers within groups of ranks that are not built for another world yet",
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
    *refused(_ZERO, "pipeline_loading_checkpoint"),
    *refused(_ZERO, "save_muon_momentum_buffer_in_memory"),
)

OFFLOAD = (
    *works(
        _ZERO,
        "offload_optimizer",
        "stages 1 to 3; in stage 0 DeepSpeed only takes its CPU optimizer. The last gradients move too",
        _PROOF,
        switch=("device", "none"),
        at_start=keeps_pinned_memory,
    ),
    *works(_HOST_STATE, "device", proof=_PROOF, values=("cpu",)),
    *refused(_HOST_STATE, "device", _DISK, "use cpu", off=(None, "none")),
    *works(_HOST_STATE, "pin_memory", proof=_PROOF),
    *works(_HOST_STATE, "fast_init nvme_path buffer_count pipeline_read pipeline_write", _FOR_DISK),
    *works(_HOST_STATE, "cpuadam_cores_perc", "only read by SuperOffload"),
    *refused(
        _HOST_STATE,
        "ratio",
        "Twin-Flow keeps a second optimizer for some of ZeRO-3's sub-groups, whose states are not followed",
        "leave it at 1.0",
        off=(None, 1.0),
    ),
    *refused(
        _HOST_STATE, "super_offload", "its optimizer steps in a process of its own, whose state is not followed", _OFF
    ),
    *works(
        _ZERO,
        "offload_param",
        "stage 3; DeepSpeed ignores it in the others",
        _PROOF,
        switch=("device", "none"),
        at_start=keeps_pinned_memory,
    ),
    *works(_HOST_WEIGHTS, "device", proof=_PROOF, values=("cpu",)),
    *refused(_HOST_WEIGHTS, "device", _DISK, "use cpu", off=(None, "none")),
    *works(_HOST_WEIGHTS, "pin_memory", proof=_PROOF),
    *works(_HOST_WEIGHTS, "max_in_cpu nvme_path buffer_count buffer_size", _FOR_DISK),
    *refused(
        _ZERO,
        "cpu_offload cpu_offload_param cpu_offload_use_pin_memory",
        "an old name",
        "write blocks offload_optimizer and offload_param",
    ),
    *refused(_ZERO, "zenflow", "its masters are updated in parts and at different steps, beside training", below=True),
    *works("", "aio", _FOR_DISK, below=True),
)
