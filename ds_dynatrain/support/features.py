"""Rows of sections that change the model, its parallelism, or the samples."""

from __future__ import annotations

from ds_dynatrain.support.row import refused, works

_AXIS = "only the data axis can change yet"

FEATURES = (
    *works("", "activation_checkpointing"),
    *refused("activation_checkpointing", "partition_activations contiguous_memory_optimization cpu_checkpointing"),
    *refused("activation_checkpointing", "number_checkpoints synchronize_checkpoint_boundary profile"),
    *refused("", "compile", below=True),
    *refused("", "data_efficiency", switch=("enabled", False), below=True),
    *refused("", "hybrid_engine", switch=("enabled", False), below=True),
    *refused("", "weight_quantization", below=True),
)

PARALLELISM = (
    *refused("", "pipeline", _AXIS, below=True),
    *refused("", "tensor_parallel", _AXIS, switch=("autotp_size", 0), below=True),
    *refused("", "expert_parallel", _AXIS, switch=("enabled", False), below=True),
    *refused("", "sequence_parallel_size data_parallel_size", _AXIS, off=(None, 1)),
    *refused("", "use_data_before_expert_parallelism", _AXIS),
)
