"""Rows of the top of DeepSpeed's configuration: batches, printing, monitors, checkpoints, profilers."""

from __future__ import annotations

from ds_dynatrain.support.checks import scales_gradients, times_stages, unmanaged_overlap
from ds_dynatrain.support.row import refused, works

_MATRIX = "tests/engine/test_matrix.py"
_SETTINGS = "tests/engine/test_settings.py"
_REPORTS = "tests/engine/test_reports.py"
_REDUCTIONS = "tests/engine/test_reductions.py"
_SCALED = "at stages 2 and 3 only with zero_optimization.reduce_scatter false"
_GONE = "DeepSpeed has removed it and refuses the key itself"

BATCHES = (
    *works("", "train_batch_size", proof="tests/engine/test_loops.py"),
    *works("", "train_micro_batch_size_per_gpu", "the largest micro-batch of any world", "tests/engine/test_loops.py"),
    *works("", "gradient_accumulation_steps", "follows in every world: leave it out", "tests/engine/test_loops.py"),
    *works(
        "",
        "managed_gradient_accumulation",
        "false: call step() once, after the last micro-batch of a global batch; how many these are depends on the "
        "world (`gradient_accumulation_steps()`), and in the middle step() raises",
        "tests/engine/test_usage.py",
        off=(None, True),
        at_layout=unmanaged_overlap,
    ),
    *works("", "gradient_clipping", proof=_MATRIX),
    *works("", "dataloader_drop_last", proof="tests/data/test_loader.py"),
    *works("", "prescale_gradients", _SCALED, _REDUCTIONS, at_layout=scales_gradients),
    *works("", "gradient_predivide_factor", _SCALED, _REDUCTIONS, off=(None, 1.0), at_layout=scales_gradients),
    *works("", "disable_allgather", proof=_SETTINGS),
    *refused("", "gradient_allreduce_op", "a sum of gradients grows with the world", off=(None, "mean")),
    *works("", "communication_data_type", proof="tests/engine/test_precision.py"),
    *works(
        "", "seq_parallel_communication_data_type", "of gradients where the sequence axis is above 1, fp32 if not given"
    ),
)

REPORTS = (
    *works("", "steps_per_print memory_breakdown dump_state log_level", proof=_SETTINGS),
    *works(
        "",
        "wall_clock_breakdown",
        "with one stage; with more of them plain DeepSpeed 0.19.8 fails in the first step, so it is refused",
        _REPORTS,
        at_layout=times_stages,
    ),
    *works("", "disable_python_gc"),
    *works("", "vocabulary_size", "DeepSpeed only warns if it is not a multiple of 8", _SETTINGS),
    *works("", "timers", proof=_SETTINGS),
    *works("timers", "throughput", proof=_SETTINGS),
    *works("timers.throughput", "enabled synchronized", proof=_SETTINGS),
    *works("", "tensorboard", "rank 0 writes; one run across switches while member 0 works", switch=("enabled", False)),
    *works("tensorboard", "enabled output_path job_name"),
    *works("", "wandb", "rank 0 writes; one run across switches while member 0 works", switch=("enabled", False)),
    *works("wandb", "enabled group team project"),
    *works(
        "",
        "csv_monitor",
        "rank 0 writes; one run across switches while member 0 works",
        _REPORTS,
        switch=("enabled", False),
    ),
    *works("csv_monitor", "enabled output_path job_name"),
    *refused("", "comet", switch=("enabled", False), below=True),
    *works("", "comms_logger", proof=_REPORTS, switch=("enabled", False)),
    *works("comms_logger", "enabled prof_all prof_ops verbose debug"),
    *works("", "flops_profiler", "of the step's own world; rank 0 writes", _REPORTS, switch=("enabled", False)),
    *works("flops_profiler", "enabled recompute_fwd_factor profile_step module_depth"),
    *works("flops_profiler", "top_modules detailed output_file"),
    *refused("", "autotuning", "it restarts the job with other settings", switch=("enabled", False), below=True),
)

CHECKPOINTS = (
    *works(
        "",
        "checkpoint",
        "save_checkpoint and load_checkpoint work between switches",
        "tests/engine/test_checkpoints.py",
    ),
    *works("checkpoint", "tag_validation checkpoint_serialization use_node_local_storage"),
    *refused("checkpoint", "load_universal"),
    *refused("checkpoint", "writer", below=True),
    *refused("checkpoint", "parallel_write", "it is for pipelines", below=True),
    *refused("", "datastates_ckpt", off=(False,), below=True),
)

REMOVED = (
    *refused(
        "", "nebula compression_training amp quantize_training sparse_gradients eigenvalue", _GONE, off=(), below=True
    ),
    *refused("", "sparse_attention elasticity graph_harvesting", _GONE, off=(), below=True),
    *refused("", "curriculum_learning progressive_layer_drop", _GONE, off=(), below=True),
    *refused(
        "zero_optimization",
        "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
        _GONE,
        off=(),
        below=True,
    ),
)
