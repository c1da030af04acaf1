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
    "deepspeed": "set_optimizer_flags init_distributed",
    "deepspeed.comm.comm": "cdb",
    "deepspeed.constants": "default_pg_timeout",
    "deepspeed.pipe": "LayerSpec PipelineModule TiedLayerSpec",
    "deepspeed.monitor.monitor:MonitorMaster": "write_events",
    "deepspeed.moe.layer": "MoE",
    "deepspeed.moe.sharded_moe": "MOELayer TopKGate",
    "deepspeed.moe.utils": "configure_moe_param_groups is_moe_param",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "get_cuda_rng_tracker non_reentrant_checkpoint",
    "deepspeed.ops.op_builder.builder:OpBuilder": "jit_load",
    "deepspeed.ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "deepspeed.runtime.base_optimizer": "ZeROOptimizer",
    "deepspeed.runtime.config": "DeepSpeedConfig",
    "deepspeed.runtime.data_pipeline.constants": "RANDOM_LTD_GLOBAL_BATCH_SIZE RANDOM_LTD_MICRO_BATCH_SIZE",
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler:DeepSpeedDataSampler": "get_next_global_batch",
    "deepspeed.runtime.engine": "MEMORY_OPT_ALLREDUCE_SIZE",
    "deepspeed.runtime.engine:DeepSpeedEngine": """
        allreduce_gradients backward load_checkpoint _configure_optimizer _configure_basic_optimizer
        _configure_checkpointing
        _configure_distributed_model _backward_prologue _backward_prologue_per_tensor _broadcast_model
        _backward_post_hook _take_model_step clip_fp32_gradients get_data_types _configure_random_ltd_scheduler
        _do_optimizer_sanity_check
        random_ltd_config zero_force_ds_cpu_optimizer zero_cpu_offload zero_use_cpu_optimizer zero_round_robin_gradients
    """,
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": """
        _update_storage_to_flattened_tensor _link_all_hp_params _lazy_init_hp_params_optimizer_state
        _create_param_mapping
    """,
    "deepspeed.runtime.bf16_optimizer": "see_memory_usage",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer": "initialize_optimizer_states refresh_fp32_params",
    "deepspeed.runtime.fp16.loss_scaler": "CreateLossScaler DynamicLossScaler LossScaleConfig LossScaler",
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer": """
        initialize_optimizer_states refresh_fp32_params _update_scale
    """,
    "deepspeed.runtime.pipe.engine:PipelineEngine": """
        _INSTRUCTION_MAP _aggregate_total_loss _allocate_or_extend_buffers _exec_backward_pass _exec_forward_pass
        _exec_reduce_grads _exec_reduce_tied_grads _exec_schedule _scale_loss_by_gas _take_model_step compile
        eval_batch reset_activation_shape train_batch
    """,
    "deepspeed.runtime.pipe.module:PipelineModule": """
        _build _partition_layers _precompute_checkpointable_values _set_bounds stage_owner
    """,
    "deepspeed.runtime.pipe.p2p": "_grid",
    "deepspeed.runtime.pipe.schedule": """
        BackwardPass ForwardPass LoadMicroBatch RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation
        SendGrad
    """,
    "deepspeed.runtime.pipe.topology:PipeDataParallelTopology": "filter_match",
    "deepspeed.runtime.pipe.topology:PipelineParallelGrid": "_build_p2p_groups",
    "deepspeed.runtime.torch_autocast": "init_autocast_params TORCH_AUTOCAST_DTYPE TORCH_AUTOCAST_INITIALIZED",
    "deepspeed.runtime.utils": """
        check_internal_apis_for_count_used_parameters clip_grad_norm_ is_model_parallel_parameter partition_balanced
        partition_uniform
    """,
    "deepspeed.runtime.zero": "Init",
    "deepspeed.runtime.zero.config": "ZERO_OPTIMIZATION",
    "deepspeed.runtime.zero.offload_config:OffloadDeviceEnum": "cpu",
    "deepspeed.runtime.zero.parameter_offload": "FWD_MODULE_STACK ZeROOrderedDict",
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": """
        _register_deepspeed_module partition_all_parameters
    """,
    "deepspeed.runtime.zero.partition_parameters:GatheredParameters": "__enter__",
    "deepspeed.runtime.zero.partition_parameters:Init": """
        param_id num_persisted_parameters num_persisted_elements apply_param_persistence _partition_param
        _convert_to_zero_parameters _post_init_method
    """,
    "deepspeed.runtime.zero.partition_parameters": """
        InsertPostInitMethodToModuleSubClasses top_level_context shutdown_init_context restore_init_context
    """,
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus": "NOT_AVAILABLE",
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": """
        _PartitionedParameterCoordinator__params_to_release
    """,
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": """
        reduce_ready_partitions_and_remove_grads set_grad_positions _update_scale
        _create_param_groups_fp16_flat_cpu_memory complete_grad_norm_calculation_for_cpu_offload
    """,
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": """
        _update_model_bit16_weights get_data_parallel_partitions _link_all_hp_params
        _lazy_init_hp_params_optimizer_state _create_param_mapping _create_optimizer_mapping _get_offload_gradient_dict
        get_grad_position complete_grad_norm_calculation_for_cpu_offload _update_scale
    """,
    "deepspeed.runtime.zero.utils": "ZERO_SUPPORTED_OPTIMIZERS apply_to_tensors_only",
    "deepspeed.utils": "link_hp_params z3_leaf_module",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "_SEQUENCE_DATA_PARALLEL_GROUP _SEQUENCE_PARALLEL_GROUP",
    "deepspeed.utils.groups": """
        _DATA_PARALLEL_GROUP _EXPERT_DATA_PARALLEL_GROUP _EXPERT_DATA_PARALLEL_GROUP_RANKS _EXPERT_PARALLEL_GROUP
        _EXPERT_PARALLEL_GROUP_RANKS _MODEL_PARALLEL_GROUP _MPU_TENSOR_MODEL_PARALLEL_RANK
        _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE _TENSOR_MODEL_PARALLEL_GROUP _WORLD_GROUP
        _get_expert_data_parallel_group_dict _get_expert_parallel_group_dict _get_expert_parallel_rank
        _get_data_parallel_group _get_expert_data_parallel_group _get_expert_parallel_group
        _get_max_expert_parallel_group expert_tensor_parallel_world_size mesh_device mpu
    """,
}


def check_names(*names: Names) -> None:
    """ImportError, naming every missing name and both versions, unless all are there.

    names: tables; by default that of every series, and that of the installed one.
    """
    rows = itertools.chain.from_iterable(table.items() for table in names or (NAMES, present().names))
    missing = [".".join(path) for row in rows for path in paths(*row) if not _is_there(*path)]
    if missing:
        raise ImportError(
            f"ds_dynatrain {__version__} relies on names that DeepSpeed {deepspeed.__version__} does not have: "
            f"{', '.join(missing)}. It is tested with DeepSpeed {versions_tested()}: install one of these, or a newer "
            "ds_dynatrain"
        )


def paths(holder: str, names: str) -> list[list[str]]:
    """Each name of a row of a table: the module, then the levels below it."""
    module, *classes = holder.split(":")
    return [[module, *classes, *name.split(".")] for name in names.split()]


def _is_there(module: str, *names: str) -> bool:
    try:
        held: object = importlib.import_module(module)
        for name in names:
            held = getattr(held, name)
    except (ImportError, AttributeError):
        return False
    return True
