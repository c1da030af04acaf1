"""Rows of sections that change the model, its parallelism, or the samples."""

from __future__ import annotations

from ds_dynatrain.support.row import refused, works

_CHECKPOINTING = "tests/engine/test_checkpointing_streams.py"
_DATA_EFFICIENCY = "tests/engine/test_data_efficiency.py"
_EXPERTS = "tests/engine/test_transitions.py::test_walk"
_PIPELINE = "tests/engine/test_pipeline.py"
_TENSOR = "tests/engine/test_tensor.py"
_ORDER = "it orders ranks in another way than a layout does"

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
        "of a PipelineModule: `partition` is the partition_method of other numbers of stages than it was built with, "
        'of all numbers if it is ["profile"](balance-job.md#boundaries-of-the-start); '
        "activation_checkpoint_interval and use_reentrant are DeepSpeed's, its other keys do nothing there",
        _PIPELINE,
        below=True,
    ),
    *works("", "tensor_parallel", proof=_TENSOR),
    *works(
        "tensor_parallel",
        "autotp_size",
        "the tensor axis to start with, where dynatrain.layout names none; see [tensor](tensor.md)",
        f"{_TENSOR}::test_a_start_from_the_size_of_deepspeed",
    ),
    *works(
        "tensor_parallel",
        "preset_model tp_overlap_comm vocab_parallel_lm_head",
        "AutoTP's own, the same in every layout; some of these were tried",
        "tests/engine/test_experts.py",
    ),
    *works(
        "tensor_parallel",
        "partition_config",
        "AutoTP's own rules, the same in every layout; what they cut and AutoTP does not describe is refused",
        f"{_TENSOR}::test_rules_in_the_configuration_hold_in_every_layout",
        below=True,
    ),
    *refused(
        "tensor_parallel",
        "dtype injection_policy_tuple keep_module_on_host kernel_inject replace_with_kernel_inject "
        "vocab_parallel_ce_backend",
        off=(None, False, "torch"),
    ),
    *refused("tensor_parallel", "tp tensor_parallel", off=(None, {}), below=True),
    *works("", "expert_parallel", proof=_EXPERTS, switch=("enabled", False)),
    *works("expert_parallel", "enabled", proof=_EXPERTS),
    *works(
        "expert_parallel",
        "autoep_size",
        "the expert axis to start with, where dynatrain.layout names none; see [experts](experts.md)",
        "tests/engine/test_experts.py::test_a_start_with_experts_apart",
    ),
    *works(
        "expert_parallel",
        "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern use_grouped_mm "
        "disable_triton_grouped_mm route_norm route_scale score_apply combine_impl gate_up_impl num_expert_groups "
        "num_limited_groups score_func top_k routed_scaling_factor expert_activation validate_folding_routing",
        "about AutoEP's layers, the same in every layout; some of these were tried",
        "tests/engine/test_experts.py::test_options_of_the_layers",
        off=(None, False, {}, "auto"),
    ),
    *refused(
        "expert_parallel",
        "comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank row_weighting_impl async_split_plan",
        "it is for accelerators that a live switch was not tested on",
        "leave it out",
        off=(None, False, 0, 4, 12, "comm", "auto", "eager"),
    ),
    *refused(
        "expert_parallel",
        "expert_tensor_parallel_size",
        "DeepSpeed itself takes no other than 1",
        "leave it out",
        off=(None, False, 1),
    ),
    *refused("expert_parallel", "load_balance_coeff", "DeepSpeed itself takes none", "leave it out", off=(None,)),
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
    *refused("", "use_data_before_expert_parallelism", _ORDER),
)
