"""The names of DeepSpeed's that the adapters rely on, checked before anything else of them is imported.

DeepSpeed moves fast, and most of these are private: a missing one is an error that names both versions, not an
AttributeError in the middle of a training.
"""

from __future__ import annotations

import importlib
import itertools

import deepspeed

from ds_dynatrain.adapters.versions import Names, present, versions_tested
from ds_dynatrain.version import __version__

NAMES: Names = {
    "deepspeed": ("set_optimizer_flags", "init_distributed"),
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.constants": ("default_pg_timeout",),
    "deepspeed.pipe": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "deepspeed.moe.layer": ("MoE",),
    "deepspeed.moe.sharded_moe": ("MOELayer", "TopKGate"),
    "deepspeed.moe.utils": ("configure_moe_param_groups", "is_moe_param"),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.runtime.activation_checkpointing.checkpointing": ("get_cuda_rng_tracker",),
    "deepspeed.ops.adam": ("FusedAdam", "DeepSpeedCPUAdam"),
    "deepspeed.runtime.base_optimizer": ("ZeROOptimizer",),
    "deepspeed.runtime.config": ("DeepSpeedConfig",),
    "deepspeed.runtime.data_pipeline.constants": ("RANDOM_LTD_GLOBAL_BATCH_SIZE", "RANDOM_LTD_MICRO_BATCH_SIZE"),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": ("DeepSpeedDataSampler.get_next_global_batch",),
    "deepspeed.runtime.engine": (
        "DeepSpeedEngine.backward",
        "DeepSpeedEngine.load_checkpoint",
        "DeepSpeedEngine._configure_optimizer",
        "DeepSpeedEngine._configure_basic_optimizer",
        "DeepSpeedEngine._configure_checkpointing",
        "DeepSpeedEngine._configure_distributed_model",
        "DeepSpeedEngine._backward_prologue",
        "DeepSpeedEngine._backward_prologue_per_tensor",
        "DeepSpeedEngine._broadcast_model",
        "DeepSpeedEngine._backward_post_hook",
        "DeepSpeedEngine._take_model_step",
        "DeepSpeedEngine.clip_fp32_gradients",
        "DeepSpeedEngine.get_data_types",
        "DeepSpeedEngine._configure_random_ltd_scheduler",
        "DeepSpeedEngine.random_ltd_config",
        "DeepSpeedEngine.zero_force_ds_cpu_optimizer",
        "DeepSpeedEngine.zero_cpu_offload",
        "DeepSpeedEngine.zero_use_cpu_optimizer",
        "DeepSpeedEngine.zero_round_robin_gradients",
    ),
    "deepspeed.runtime.bf16_optimizer": (
        "BF16_Optimizer._update_storage_to_flattened_tensor",
        "BF16_Optimizer._link_all_hp_params",
        "BF16_Optimizer._lazy_init_hp_params_optimizer_state",
        "BF16_Optimizer._create_param_mapping",
        "see_memory_usage",
    ),
    "deepspeed.runtime.fp16.fused_optimizer": (
        "FP16_Optimizer.initialize_optimizer_states",
        "FP16_Optimizer.refresh_fp32_params",
    ),
    "deepspeed.runtime.fp16.loss_scaler": ("CreateLossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaler"),
    "deepspeed.runtime.fp16.unfused_optimizer": (
        "FP16_UnfusedOptimizer.initialize_optimizer_states",
        "FP16_UnfusedOptimizer.refresh_fp32_params",
        "FP16_UnfusedOptimizer._update_scale",
    ),
    "deepspeed.runtime.pipe.engine": (
        "PipelineEngine._allocate_or_extend_buffers",
        "PipelineEngine._take_model_step",
        "PipelineEngine.compile",
        "PipelineEngine.reset_activation_shape",
    ),
    "deepspeed.runtime.pipe.module": (
        "PipelineModule._build",
        "PipelineModule._partition_layers",
        "PipelineModule._precompute_checkpointable_values",
        "PipelineModule._set_bounds",
        "PipelineModule.stage_owner",
    ),
    "deepspeed.runtime.pipe.p2p": ("_grid",),
    "deepspeed.runtime.pipe.topology": (
        "PipeDataParallelTopology.filter_match",
        "PipelineParallelGrid._build_p2p_groups",
    ),
    "deepspeed.runtime.torch_autocast": (
        "init_autocast_params",
        "TORCH_AUTOCAST_DTYPE",
        "TORCH_AUTOCAST_INITIALIZED",
    ),
    "deepspeed.runtime.utils": (
        "check_internal_apis_for_count_used_parameters",
        "is_model_parallel_parameter",
        "partition_balanced",
        "partition_uniform",
    ),
    "deepspeed.runtime.zero.parameter_offload": (
        "FWD_MODULE_STACK",
        "DeepSpeedZeRoOffload._register_deepspeed_module",
        "DeepSpeedZeRoOffload.partition_all_parameters",
        "ZeROOrderedDict",
    ),
    "deepspeed.runtime.zero.partition_parameters": (
        "GatheredParameters.__enter__",
        "Init.param_id",
        "Init.num_persisted_parameters",
        "Init.num_persisted_elements",
        "Init.apply_param_persistence",
        "InsertPostInitMethodToModuleSubClasses",
        "ZeroParamStatus.NOT_AVAILABLE",
        "top_level_context",
        "shutdown_init_context",
        "restore_init_context",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator": (
        "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release",
    ),
    "deepspeed.runtime.zero.stage3": (
        "DeepSpeedZeroOptimizer_Stage3.reduce_ready_partitions_and_remove_grads",
        "DeepSpeedZeroOptimizer_Stage3.set_grad_positions",
        "DeepSpeedZeroOptimizer_Stage3._update_scale",
        "DeepSpeedZeroOptimizer_Stage3._create_param_groups_fp16_flat_cpu_memory",
        "DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload",
    ),
    "deepspeed.runtime.zero.stage_1_and_2": (
        "DeepSpeedZeroOptimizer._update_model_bit16_weights",
        "DeepSpeedZeroOptimizer.get_data_parallel_partitions",
        "DeepSpeedZeroOptimizer._link_all_hp_params",
        "DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
        "DeepSpeedZeroOptimizer._create_param_mapping",
        "DeepSpeedZeroOptimizer._create_optimizer_mapping",
        "DeepSpeedZeroOptimizer._get_offload_gradient_dict",
        "DeepSpeedZeroOptimizer.get_grad_position",
        "DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload",
        "DeepSpeedZeroOptimizer._update_scale",
    ),
    "deepspeed.runtime.zero.utils": ("ZERO_SUPPORTED_OPTIMIZERS",),
    "deepspeed.utils": ("link_hp_params",),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": (
        "_SEQUENCE_DATA_PARALLEL_GROUP",
        "_SEQUENCE_PARALLEL_GROUP",
    ),
    "deepspeed.utils.groups": (
        "_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_MODEL_PARALLEL_GROUP",
        "_MPU_TENSOR_MODEL_PARALLEL_RANK",
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_WORLD_GROUP",
        "_get_expert_data_parallel_group_dict",
        "_get_expert_parallel_group_dict",
        "_get_expert_parallel_rank",
        "_get_data_parallel_group",
        "_get_expert_data_parallel_group",
        "_get_expert_parallel_group",
        "_get_max_expert_parallel_group",
        "expert_tensor_parallel_world_size",
        "mesh_device",
        "mpu",
    ),
}


def check_names(*names: Names) -> None:
    """ImportError, naming every missing name and both versions, unless all are there.

    names: tables of module -> names; by default those of every series, and those of the installed one.
    """
    rows = itertools.chain.from_iterable(table.items() for table in names or (NAMES, present().names))
    missing = [f"{module}.{name}" for module, wanted in rows for name in wanted if not _has(module, name)]
    if missing:
        raise ImportError(
            f"ds_dynatrain {__version__} relies on names that DeepSpeed {deepspeed.__version__} does not have: "
            f"{', '.join(missing)}. It is tested with DeepSpeed {versions_tested()}: install one of these, or a newer "
            "ds_dynatrain"
        )


def _has(module: str, path: str) -> bool:
    try:
        held: object = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if not hasattr(held, name):
            return False
        held = getattr(held, name)
    return True
