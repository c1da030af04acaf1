"""Differences between the DeepSpeed series with which this package is tested. No other file checks DeepSpeed's version.

A series is a range of patch versions of one minor version, from its oldest tested version up to the next series. All
versions of a series are accepted. The private names on which the adapters rely are checked before any other adapter is
imported, and the census of every switch checks where DeepSpeed's buffers lie. A missing name thus causes an error that
names both versions, not an AttributeError during training.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import deepspeed
import torch
from packaging.version import Version

from ds_dynatrain.adapters.versions.torch_versions import has
from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from ds_dynatrain.support.checks import setting
from ds_dynatrain.version import __version__

Names = Mapping[str, str]
"""A map from "module" or "module:class" to the names in it, separated by spaces."""


@dataclass(frozen=True)
class RefusedKey:
    """A key of the configuration that one series of DeepSpeed versions refuses.

    reason: why it is refused.
    harmless: values of the key that are accepted.
    """

    reason: str
    harmless: tuple[object, ...] = (None, False, {}, "auto")


@dataclass(frozen=True)
class Series:
    """A range of versions of DeepSpeed, and how they differ from the others.

    tested: the versions with which the tests ran, the oldest of the series first.
    names: the private names on which the adapters rely in this series alone.
    collector: the module in which ZeRO-3's constructor looks up `gc`.
    refused: a map from each dotted key of the configuration that this series refuses to the reason.
    gathers_by_address: whether ZeRO-3 begins the gathers of several groups in the order of memory addresses.
    is_newest: whether everything was tested: DeepSpeed's own optimizers, axes other than data, and gradients added leaf
        by leaf (a leaf is a micro-batch of fixed size). The other series step (and decay) frozen parameters in groups
        of 16-bit optimizers at stage 0. In ZeRO-3 they wait only for the last of many gathers, although gloo ends
        gathers in any order. They do not record how AutoTP has cut a parameter.
    """

    tested: tuple[str, ...]
    names: Names
    collector: str
    refused: Mapping[str, RefusedKey] = field(default_factory=dict)
    gathers_by_address: bool = True
    is_newest: bool = False
    needs_elements: tuple[int, ...] = (1, 2, 3)
    """The ZeRO stages that refuse a parameter without elements."""


NEWER = "DeepSpeed before 0.19.8 lacks it or is untested with it; leave it out, or install DeepSpeed 0.19.8"

UNTRIED = "tested with DeepSpeed 0.19.8 only; leave it out, or install that"

_GATHERS = "_PartitionedParameterCoordinator__all_gather_params"
_GATHERING = {"deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": _GATHERS}

_NEWEST = Series(
    tested=("0.19.8",),
    names={
        "deepspeed.runtime.engine:DeepSpeedEngine": """
            _configure_expert_parallel _configure_python_gc zero_parameter_alignment _apply_autotp_partitioning
            _configure_tensor_parallel_states
        """,
        "deepspeed.runtime.base_optimizer:ZeROOptimizer": """
            is_gradient_accumulation_boundary set_gradient_accumulation_boundary
        """,
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": """
            _get_norm_groups overlapping_partition_gradients_reduce_epilogue
        """,
        "deepspeed.runtime.utils": "combine_grad_norm_groups",
        **_GATHERING,
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": """
            overlapping_partition_gradients_reduce_epilogue process_gradients scaled_global_norm
        """,
        "deepspeed.runtime.pipe.engine:PipelineEngine": "_configure_expert_parallel",
        "deepspeed.runtime.tensor_parallel.config": "TPTrainingConfig",
        "deepspeed.module_inject.auto_tp": "groups",
        "deepspeed.module_inject.layers": """
            TensorParallel_Layer configure_tensor_parallel_runtime is_autotp_training_mode
        """,
        "deepspeed.sequence.cross_entropy": "VocabParallelCausalLMLoss",
        "deepspeed.runtime.zero.utils": "gc defragment",
        "deepspeed.checkpoint.autoep_affine": "autoep_placement_to_affine_map make_autoep_placement_descriptor",
        "deepspeed.checkpoint.constants": """
            AFFINE_MAP AUTOEP_PARAM_LOGICAL_SHAPE AUTOEP_EXPERT_PLACEMENT AUTOEP_PARAM_EP_RANK
            AUTOEP_PARAM_LOCAL_EXPERTS AUTOEP_PLACEMENT_EXPERTS AUTOEP_PLACEMENT_RANKS DS_AUTOEP_UC_META
            DS_AUTOTP_UC_META
        """,
        "deepspeed.module_inject.auto_ep:AutoEP": "ep_parser replace_moe_layers",
        "deepspeed.module_inject.auto_ep_config": """
            parse_autoep_config validate_autoep_config validate_autoep_post_detection
        """,
        "deepspeed.module_inject.auto_ep_folding": "FoldingGroupHandles build_folding_spec local_folding_ranks",
        "deepspeed.module_inject.auto_ep_layer:AutoEPMoELayer": "_is_autoep_layer",
    },
    collector="deepspeed.runtime.zero.utils",
    is_newest=True,
    needs_elements=(3,),
)

_REFUSED_BEFORE_0_19_8 = {
    **dict.fromkeys(
        ("data_types.buffer_dtype", "data_types.keep_in_fp32_modules", "data_types.param_dtype", "disable_python_gc"),
        RefusedKey(NEWER),
    ),
    **dict.fromkeys(("data_efficiency.enabled", "expert_parallel.enabled"), RefusedKey(UNTRIED)),
    **dict.fromkeys(("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"), RefusedKey(UNTRIED)),
    "data_types.grad_accum_dtype": RefusedKey(
        "BF16_Optimizer of DeepSpeed before 0.19.8 leaves the last micro-batch of a window unreduced; leave it out, or "
        "install DeepSpeed 0.19.8",
        (None, "auto"),
    ),
    "fp16.enabled": RefusedKey("its loss scale is followed with DeepSpeed 0.19.8 only; take bf16, or install that"),
    "gradient_allreduce_op": RefusedKey(NEWER, (None, "mean", "auto")),
    "managed_gradient_accumulation": RefusedKey(NEWER, (None, True, "auto")),
    "zero_optimization.compute_grad_norm": RefusedKey(NEWER, (None, True, "auto")),
    "zero_optimization.parameter_alignment": RefusedKey(NEWER),
    **dict.fromkeys(
        ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
        RefusedKey(UNTRIED, (None, "none")),
    ),
    "zero_optimization.round_robin_gradients": RefusedKey(
        "DeepSpeed before 0.19.8 cannot link parameters to their masters then; leave it out, or install 0.19.8"
    ),
    "zero_optimization.contiguous_gradients": RefusedKey(
        "false leaves gradients unreduced on a CPU in DeepSpeed before 0.19.8; leave it out, or install 0.19.8",
        (None, True, "auto"),
    ),
}

_SINCE_0_18_9 = Series(
    tested=("0.18.9",),
    names={
        "deepspeed.runtime.zero.partition_parameters:Init": "_allgather_params_coalesced",
        "deepspeed.runtime.zero.stage3": "gc",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": "defragment",
    },
    collector="deepspeed.runtime.zero.stage3",
    refused=_REFUSED_BEFORE_0_19_8,
    gathers_by_address=False,
)

_SINCE_0_19_2 = replace(
    _SINCE_0_18_9,
    tested=("0.19.2", "0.19.6"),
    names={
        "deepspeed.runtime.zero.partition_parameters:Init": "_allgather_params_coalesced",
        "deepspeed.runtime.zero.utils": "gc defragment",
        **_GATHERING,
    },
    collector="deepspeed.runtime.zero.utils",
    gathers_by_address=True,
)

SERIES = (_NEWEST, _SINCE_0_19_2, _SINCE_0_18_9)
"""Supported series, the newest first. The newest is the one mainly used for development."""


def versions_tested() -> str:
    """Return the versions with which the tests ran, for messages and docs."""
    *others, last = (version for series in SERIES for version in reversed(series.tested))
    return f"{', '.join(others)} and {last}"


def series_of(version: str) -> Series:
    """Return the series to which a version of DeepSpeed belongs.

    Raises ImportError, naming the tested versions, if the version is not supported.
    """
    parsed = Version(version).release
    for series in SERIES:
        oldest = Version(series.tested[0]).release
        if oldest[:2] == parsed[:2] and oldest <= parsed:
            return series
    raise ImportError(
        f"DeepSpeed {version} is installed; ds_dynatrain is tested with {versions_tested()}. Install one of these "
        "(or a newer patch), or a newer ds_dynatrain"
    )


def present() -> Series:
    """Return the installed series of DeepSpeed."""
    return series_of(deepspeed.__version__)


def refuse_for_series(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError, naming the key, for settings that the series does not support or gets wrong."""
    for key, refusal in present().refused.items():
        if setting(config, key) not in refusal.harmless:
            raise UnsupportedError(f"{key}: {refusal.reason}")


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError for DeepSpeed's own optimizers if they were not tested with the installed series."""
    kind = type(optimizer)
    if not present().is_newest and kind.__module__.startswith("deepspeed."):
        raise UnsupportedError(f"optimizer {kind.__name__}: {UNTRIED}, or take torch's (`torch_adam`: true)")


def refuse_axes(layout: Layout) -> None:
    """Raise SwitchRefused if a layout uses axes other than data that the installed series was not tested with."""
    wide = [f"{axis}={size}" for axis, size in layout.axes().items() if axis != "data" and size > 1]
    if wide and not present().is_newest:
        raise SwitchRefused(
            f"{', '.join(wide)}: {UNTRIED.partition(';')[0]}",
            "install DeepSpeed 0.19.8, or leave the axis at 1",
        )


def refuse_groups(groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise UnsupportedError for frozen 16-bit parameters in an optimizer group if stage 0 would decay them."""
    if present().is_newest:
        return
    for number, group in enumerate(groups):
        if any(not held.requires_grad and held.dtype != torch.float32 for held in group):
            raise UnsupportedError(
                f"optimizer group {number} holds frozen parameters, which ZeRO stage 0 of DeepSpeed before 0.19.8 "
                "would decay; give the optimizer only those with requires_grad, or install DeepSpeed 0.19.8"
            )


def repair_defects() -> None:
    """Repair defects of the installed series that affect every engine. Called once in a process, before an engine is
    built."""
    if not present().is_newest:
        gather_one_by_one(importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init)
    if present().gathers_by_address:
        coordinators = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
        gather_in_one_order(coordinators.PartitionedParameterCoordinator)


def gather_one_by_one(kind: Any) -> None:
    """Make `kind` (ZeRO-3's `Init`) gather one parameter after the other.

    0.18.9 starts one gather per parameter and waits only for the last one. Persistent parameters, which are gathered
    together at the end of a step, could therefore be read before they are complete.
    """
    together = kind._allgather_params_coalesced
    if hasattr(together, "__wrapped__"):
        return

    @functools.wraps(together)
    def one_by_one(self: Any, param_list: Sequence[Any], *arguments: Any, **more: Any) -> None:
        for parameter in param_list:
            together(self, [parameter], *arguments, **more)

    kind._allgather_params_coalesced = one_by_one


def gather_in_one_order(kind: Any) -> None:
    """Make `kind` (ZeRO-3's coordinator) begin gathers in the order of parameters.

    0.19.8 iterates over a set, in the order of its members' addresses. Parameters of experts have a process group of
    their own, so ranks begin the gathers of the two groups in different orders (measured: in every second run), and
    NCCL may then hang.
    """
    together = getattr(kind, _GATHERS)
    if together.__name__ == "in_one_order":
        return

    def in_one_order(self: Any, params: Iterable[Any], forward: bool) -> None:
        together(self, sorted(params, key=attrgetter("ds_id")), forward)

    setattr(kind, _GATHERS, in_one_order)


def configure_python_gc(engine: Any) -> None:
    """Configure Python's garbage collector the way `deepspeed.initialize` does at its end since DeepSpeed 0.19."""
    if hasattr(engine, "_configure_python_gc"):
        engine._configure_python_gc()


def aligns_parameters(engine: Any) -> bool:
    """Return whether stages 1 and 2 may leave gaps between parameters (`parameter_alignment`, since DeepSpeed 0.19)."""
    return hasattr(engine, "zero_parameter_alignment") and bool(engine.zero_parameter_alignment())


def settle_flat_groups(zero: Any) -> None:
    """Detach the flat weights that DeepSpeed has just built for stages 1 and 2 from their autograd history.

    DeepSpeed 0.18 keeps the history of their concatenation, and gloo then refuses to gather into them (torch 2.13).
    """
    for group, flat in enumerate(getattr(zero, "bit16_groups_flat", ())):
        if flat.grad_fn is not None:
            zero.bit16_groups_flat[group] = flat.detach()
            zero.parallel_partitioned_bit16_groups[group] = zero.get_data_parallel_partitions(flat.detach(), group)


def flat_offsets(zero: Any, group: int) -> list[int]:
    """Return the offset, in elements, of each parameter of an optimizer group in the flat buffer of stages 1 and 2.

    The parameters are those of `zero.round_robin_bit16_groups[group]`. DeepSpeed 0.18 keeps no list of offsets; its
    parameters lie end to end.
    """
    offsets = getattr(zero, "round_robin_bit16_offsets", None)
    if offsets is not None:
        return list(offsets[group])
    numels = [parameter.numel() for parameter in zero.round_robin_bit16_groups[group]]
    return list(itertools.accumulate(numels, initial=0))[:-1]


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
        _link_all_hp_params _lazy_init_hp_params_optimizer_state
        _create_param_mapping
    """,
    "deepspeed.runtime.bf16_optimizer": "see_memory_usage",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer": "initialize_optimizer_states refresh_fp32_params",
    "deepspeed.runtime.fp16.loss_scaler": "CreateLossScaler DynamicLossScaler LossScaleConfig LossScalerBase",
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer": """
        initialize_optimizer_states refresh_fp32_params _update_scale
    """,
    "deepspeed.runtime.pipe.engine:PipelineEngine": """
        _INSTRUCTION_MAP _aggregate_total_loss _allocate_or_extend_buffers _exec_backward_pass _exec_forward_pass
        _exec_reduce_grads _exec_reduce_tied_grads _exec_schedule _scale_loss_by_gas _take_model_step
        clip_fp32_gradients compile eval_batch reset_activation_shape set_dataiterator train_batch
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
        _round_robin_reorder get_data_parallel_partitions _link_all_hp_params
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
    """Raise ImportError, naming every missing name and both versions, unless all names exist.

    names: tables of names. The default is the names of every series, and those of the installed one.
    """
    rows = itertools.chain.from_iterable(table.items() for table in names or (NAMES, present().names))
    missing = [".".join(path) for row in rows for path in paths(*row) if not has(path[0], ".".join(path[1:]))]
    if missing:
        raise ImportError(
            f"ds_dynatrain {__version__} relies on names that DeepSpeed {deepspeed.__version__} does not have: "
            f"{', '.join(missing)}. It is tested with DeepSpeed {versions_tested()}: install one of these, or a newer "
            "ds_dynatrain"
        )


def paths(holder: str, names: str) -> list[list[str]]:
    """Return the path to each name: its module, and the attributes that lead to the name.

    holder: "module" or "module:Class".
    names: the names, separated by spaces; a name may have dots.
    """
    module, *classes = holder.split(":")
    return [[module, *classes, *name.split(".")] for name in names.split()]
