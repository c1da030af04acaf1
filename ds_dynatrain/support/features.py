"""Rows of sections that change the model, its parallelism, or the samples."""

from __future__ import annotations

from ds_dynatrain.support.row import refused, works

_CHECKPOINTING = "tests/engine/test_checkpointing_streams.py"
_DATA_EFFICIENCY = "tests/engine/test_data_efficiency.py"
_PIPELINE = "tests/engine/test_pipeline.py"
_AXIS = "only the data axis can change yet"

FEATURES = (
    *works("", "activation_checkpointing", "read by deepspeed.checkpointing.configure only", _CHECKPOINTING),
    *works("activation_checkpointing", "partition_activations contiguous_memory_optimization", proof=_CHECKPOINTING),
    *works("activation_checkpointing", "cpu_checkpointing number_checkpoints", proof=_CHECKPOINTING),
    *works("activation_checkpointing", "synchronize_checkpoint_boundary profile", proof=_CHECKPOINTING),
    *refused(
        "",
        "compile",
        "DeepCompile builds one layout's communication into the graph",
        "leave it out and call engine.compile(), which is torch.compile",
        switch=("deepcompile", False),
        below=True,
    ),
    *works("", "data_efficiency", proof=_DATA_EFFICIENCY),
    *works("data_efficiency", "enabled seed", proof=_DATA_EFFICIENCY),
    *works("data_efficiency", "data_routing", proof=_DATA_EFFICIENCY),
    *works("data_efficiency.data_routing", "enabled", proof=_DATA_EFFICIENCY),
    *works(
        "data_efficiency.data_routing",
        "random_ltd",
        "its schedule is carried; call convert_to_random_ltd on every process. DeepSpeed has kernels for CUDA only",
        _DATA_EFFICIENCY,
        below=True,
    ),
    *works("data_efficiency", "data_sampling"),
    *works("data_efficiency.data_sampling", "enabled num_epochs num_workers pin_memory"),
    *works(
        "data_efficiency.data_sampling",
        "curriculum_learning",
        "every process reads the index files and keeps clusters of its own below data_cluster_path while it lives",
        _DATA_EFFICIENCY,
        switch=("enabled", False),
        below=True,
    ),
    *refused(
        "data_efficiency.data_sampling",
        "dynamic_batching",
        "its batches have no fixed size",
        "leave it out",
        switch=("enabled", False),
        below=True,
    ),
    *refused("", "hybrid_engine", switch=("enabled", False), below=True),
    *refused("", "weight_quantization", below=True),
)

PARALLELISM = (
    *works(
        "",
        "pipeline",
        "of a PipelineModule: `partition` is the partition_method of any number of stages (DeepSpeed keeps none); "
        "activation_checkpoint_interval and use_reentrant are DeepSpeed's, its other keys do nothing there",
        _PIPELINE,
        below=True,
    ),
    *refused("", "tensor_parallel", _AXIS, switch=("autotp_size", 0), below=True),
    *refused("", "expert_parallel", _AXIS, switch=("enabled", False), below=True),
    *works(
        "",
        "sequence_parallel_size",
        "the sequence axis to start with, where dynatrain.layout names none; see [sequence](sequence.md)",
        "tests/engine/test_sequence.py",
        off=(None, 1),
    ),
    *refused(
        "",
        "data_parallel_size",
        "with sequence_parallel_size it makes DeepSpeed's mesh, under which ZeRO reduces over data ranks alone: the "
        "parameters of sequence ranks drift apart",
        "leave it out and pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        off=(None,),
    ),
    *refused("", "use_data_before_expert_parallelism", _AXIS),
)
