"""The rows of the support table for uses of DeepSpeed outside its configuration.

`adapters/deepspeed/support_checks.py` detects refused uses.
"""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

_HERE = "tests/adapters/test_support.py::test_"
_WINDOWS = "tests/engine/test_windows.py"
_ENGINES = "tests/engine/test_engines.py"
_USAGE = "tests/engine/test_usage.py"
_LATE = "tests/engine/test_late.py"


def _start(name: str, why: str, instead: str, test: str) -> Row:
    return Row(name, Verdict.AT_START, why, instead, proof=test if "::" in test else _HERE + test)


def _switch(name: str, why: str, instead: str, test: str) -> Row:
    return Row(name, Verdict.AT_SWITCH, why, instead, proof=test if "::" in test else _HERE + test)


def _works(name: str, why: str, test: str) -> Row:
    return Row(name, Verdict.NOTE if why else Verdict.WORKS, why, proof=test)


USAGE = (
    _works(
        "accelerator",
        "tested on a device without hardware; what ran on GPUs, and what never did: see [GPUs](gpu.md)",
        "tests/device/test_switch_memory.py::test_no_third_copy_is_made",
    ),
    _start(
        "an elastic launch on an accelerator without NCCL",
        "only with NCCL is it known how to end a collective whose member died",
        "launch a fixed number of nodes (no MIN:MAX), or set DS_ACCELERATOR=cpu",
        "an_elastic_launch_without_nccl",
    ),
    _start(
        "an elastic launch with an old NCCL",
        "before 2.26.2 an abort after a death may hang",
        "take a newer one, launch a fixed number of nodes (no MIN:MAX), or set DS_ACCELERATOR=cpu",
        "an_elastic_launch_with_an_old_nccl",
    ),
    _start(
        "several devices in one process",
        "a process has one device",
        "start a process for each device, with torchrun --nproc-per-node",
        "several_devices",
    ),
    _switch(
        "CPU optimizers at stage 0 on an accelerator",
        "at stage 0 DeepSpeed offloads nothing, and its CPU optimizer cannot step weights on the device",
        "take stage 1 to 3, or leave offload_optimizer out",
        "a_cpu_optimizer_at_stage_0",
    ),
    _works(
        "PipelineModule",
        "built in stages, or with num_stages=1 and dynatrain.layout.pipe: see [pipelines](pipeline.md)",
        "tests/engine/test_pipeline_start.py::test_only_the_call_is_another_one",
    ),
    _works(
        "training_data of a pipeline",
        "read in its own order, as in DeepSpeed; an epoch that is no whole number of global batches needs "
        "dataloader_drop_last: see [pipelines](pipeline.md#batches)",
        "tests/engine/test_pipeline_data.py::test_training_data_is_what_deepspeed_trains_on",
    ),
    _works(
        "train_batch, set_dataiterator, set_dataloader of a pipeline with an iterator of one's own",
        "it serves until a switch changes pipe, data, shares or the members, then train_batch asks for another one: "
        "see [pipelines](pipeline.md#batches)",
        "tests/engine/test_pipeline_data.py::test_iterators_of_ones_own_across_changes",
    ),
    _works(
        "pipelines side by side with different numbers of micro-batches",
        "by layout.shares, or where data does not divide them; refused with BatchNorm, with experts that drop tokens "
        "and with an expert axis: see [pipelines](pipeline.md#batches)",
        "tests/engine/test_columns.py::test_walks",
    ),
    _works(
        "layers of deepspeed.moe in a pipeline",
        "stages and the expert size change together; a stage may be without experts: see [pipelines](pipeline.md)",
        "tests/engine/test_pipeline_experts.py::test_walks",
    ),
    _works(
        "a pipeline in bf16 without ZeRO",
        "DeepSpeed's stage 0 is then BF16_Optimizer: cut as stage 1, gradients accumulated in bf16",
        "tests/engine/test_pipeline_precision.py::test_walks",
    ),
    _switch(
        "options of ZeRO for a pipeline in bf16 without it",
        "BF16_Optimizer, which DeepSpeed takes there, knows no round_robin_gradients, parameter_alignment or offload",
        "leave the key out, or take zero_stage=1",
        "tests/engine/test_pipeline_precision.py::test_what_does_not_go_together",
    ),
    _works(
        "a pipeline in fp16, or with CPU offload",
        "",
        "tests/engine/test_pipeline_precision.py::test_walks",
    ),
    _switch(
        "stages in fp16 without ZeRO",
        "DeepSpeed clips by the norm of the first stage alone, and hangs where one has no parameter of a group",
        "take zero_stage=1, or pipe=1",
        "tests/engine/test_pipeline_precision.py::test_what_does_not_go_together",
    ),
    _works(
        "torch_autocast with a pipeline",
        "plain DeepSpeed reads gradients of activations in a wrong type on stages that receive fp32 and send bf16; "
        "here it does not",
        "tests/engine/test_pipeline_precision.py::test_autocast_as_where_it_was_started",
    ),
    _start(
        "data_efficiency beside a pipeline",
        "data_efficiency is not followed with a PipelineModule yet",
        "leave it out",
        "tests/engine/test_pipeline.py::test_what_cannot_be_is_refused",
    ),
    _works(
        "AutoEP in a pipeline",
        "with a moe_layer_pattern for names as 3.mlp, of a layer's number in the whole model; a stage may be without "
        "experts: see [pipelines](pipeline.md)",
        "tests/engine/test_pipeline_autoep.py::test_walks",
    ),
    _works(
        "engine.compile of a pipeline",
        "compiles layer by layer, also after a switch; layers that you compiled yourself are no longer compiled "
        "after a change of stages",
        "tests/engine/test_pipeline_precision.py::test_compiled_layers",
    ),
    _start(
        "engine.micro_batch of a pipeline",
        "train_batch draws the micro-batches of a global batch itself",
        "call engine.train_batch()",
        "tests/engine/test_draw_ahead.py::test_a_pipeline_draws_for_itself",
    ),
    _works(
        "mpu for sequence parallelism",
        "one with get_sequence_parallel_group, such as DeepSpeed's parallel_state_sp; see [sequence](sequence.md)",
        "tests/engine/test_sequence.py::test_it_is_what_deepspeed_computes",
    ),
    _start(
        "mpu",
        "only sequence parallelism is taken from an mpu",
        "leave it out: tensor and pipeline sizes belong into dynatrain.layout",
        "mpu",
    ),
    _start(
        "mesh_param",
        "under DeepSpeed's mesh ZeRO reduces over data ranks alone: the parameters of sequence ranks drift apart",
        "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead",
        "mesh_param",
    ),
    _start(
        "UlyssesSPAttentionHF",
        "it keeps the sizes of its first layout, out of reach of the module",
        "use deepspeed.sequence.layer.DistributedAttention in the model",
        "ulysses_of_transformers",
    ),
    _start("FPDT", "its layers were not tried", "use deepspeed.sequence.layer.DistributedAttention", "fpdt"),
    _works(
        "layers of deepspeed.moe",
        "built with the ep_size of the start, or with 1; see [experts](experts.md)",
        "tests/engine/test_transitions.py::test_walk",
    ),
    _switch(
        "options of ZeRO beside experts",
        "with experts DeepSpeed's stages 1 and 2 have no reduce_scatter false, and stage 2 no contiguous_gradients "
        "false (but with offload)",
        "leave the key out",
        "tests/engine/test_moe.py::test_what_zero_asserts_of_experts_is_refused_when_asked",
    ),
    _start(
        "experts of your own",
        "it has DeepSpeed's mark (allreduce=False) and is in no layer of deepspeed.moe",
        "use AutoEP, or remove the dynatrain block",
        "modules",
    ),
    _start(
        "no optimizer",
        "there is nothing to train with",
        "pass one to initialize, or put an `optimizer` block in",
        "no_optimizer",
    ),
    _works(
        "zero.Init",
        "at any stage; not from NVMe, quantized, or with a group of its own; in an elastic launch call "
        "ds_dynatrain.init_distributed() first",
        "tests/engine/test_zero_init.py::test_equal_to_its_whole_twin",
    ),
    _start(
        "zero.Init beside an engine where members come and go",
        "the processes over which it cuts parameters may change",
        "build all models before the first initialize, or this one whole",
        "tests/elastic/test_zero_init.py::test_under_init",
    ),
    _works(
        "meta device",
        "drawn by each module's reset_parameters() or by param_init_fn=; buffers must be real",
        "tests/engine/test_meta.py::test_equal_to_its_real_twin",
    ),
    _start(
        "element types",
        "a model has float32 parameters, or those of the bf16 or fp16 block",
        "convert the parameter, or enable the block",
        "tests/engine/test_precision.py::test_low_precision_without_its_block_is_refused",
    ),
    _start("sparse gradients", "not supported", "build the embedding with sparse=False", "modules"),
    _works(
        "engine.compile",
        "or module.compile(), on every process; each switch drops compiled code, and the next step compiles again "
        "(the event's recompile_ms, after the pause)",
        "tests/engine/test_compile.py::test_twelve_switches",
    ),
    _switch(
        "torch.compile",
        "at stage 3 DeepSpeed's first forward pass fails in a wrapped module (stages 0 to 2 work)",
        "use module.compile() or engine.compile(), which wrap nothing",
        "tests/engine/test_compile.py::test_a_wrapped_module_is_refused_at_stage_3",
    ),
    _start(
        "DeepCompile",
        "its passes build one layout's communication into the graph",
        "compile with engine.compile() alone",
        "calls_of_an_engine",
    ),
    _start(
        "compiled autograd",
        "it was not tried: it traces DeepSpeed's reduction hooks too",
        "leave compiled_autograd_enabled out",
        "calls_of_an_engine",
    ),
    _start(
        "set_train_batch_size",
        "batch sizes are settled for the whole job",
        "give them at the start",
        "calls_of_an_engine",
    ),
    _start(
        "set_train_micro_batch_size",
        "batch sizes are settled for the whole job",
        "give them at the start",
        "calls_of_an_engine",
    ),
    _start(
        "a pipeline beside another engine where members come and go",
        "a pipeline repeats a lost global batch by itself, without the other engine",
        "make the pipeline's engine first, or launch without the dynatrain rendezvous",
        "tests/elastic/test_together.py::test_what_is_refused",
    ),
    _start(
        "idle processes beside another engine",
        "an idle process waits in its loader and misses the steps of the other engine",
        "give each engine a layout over all processes",
        f"{_ENGINES}::test_layouts_that_leave_processes_idle_are_refused",
    ),
    _start(
        "a plain engine beside idle processes",
        "an idle one waits in its loader, a switch ends the engine's groups",
        "give all work, hold a frozen model without ZeRO-3, or destroy it",
        "tests/engine/test_beside_stock.py::test_a_plain_engine_wants_all_processes",
    ),
    _start(
        "a model of another engine in ZeRO-3",
        "that engine has cut its parameters apart",
        "call engine.destroy() there and build the model anew, or switch that engine's stage instead",
        f"{_ENGINES}::test_a_model_of_another_engine_is_refused",
    ),
    _start(
        "one backward pass through two engines",
        "DeepSpeed handles one engine's gradients at a time, and autograd mixes them",
        "call backward() on each loss, or detach what passes between engines",
        f"{_ENGINES}::test_a_pass_through_both_is_refused",
    ),
    _start(
        "lean switches where members come and go",
        "for a while only a checkpoint has the state, and a death then is not handled yet",
        'use "rollback" there',
        "tests/elastic/test_lean.py::test_lean_switches_are_refused",
    ),
    _works(
        "late switches",
        "masters and moments move during the first global batch; see [late switches](switching.md)",
        f"{_LATE}::test_changes_train_as_without_it",
    ),
    _works(
        "late switches where members come and go",
        "where one cannot be late, members come and go without it; see [elastic jobs](dev/elastic-protocol.md#late)",
        "tests/elastic/test_late_switches.py::test_members_come_and_go",
    ),
    _start(
        "an order of tensors by owners",
        "the order is chosen over data and sequence ranks alone, and DeepSpeed before 0.19.8 cannot link masters",
        'leave "owners" out of the dynatrain block',
        "tests/engine/test_owners.py::test_what_is_refused",
    ),
    _switch(
        "late lean switches",
        'under "safety": "lean" the source is freed before the target is built',
        'use "rollback", or leave dynatrain.late out',
        f"{_LATE}::test_what_is_refused",
    ),
    _switch(
        "late switches beside another engine",
        "a void global batch of one engine does not undo the other engine's steps",
        "leave dynatrain.late out, or switch with late=False",
        f"{_LATE}::test_beside_another_engine",
    ),
    _switch(
        "late switches of other axes",
        "they were not tried with a pipe, expert, tensor or sequence axis",
        "switch with late=False",
        f"{_LATE}::test_other_axes_are_refused",
    ),
    _switch(
        "late switches with Muon",
        "its momentum is read and written in the backward pass",
        "switch with late=False",
        f"{_LATE}::test_muon_is_refused",
    ),
    _switch(
        "late switches without a loader",
        "a global batch that becomes void is dealt again, which a loop of your own cannot do",
        "take engine.loader(dataset), or switch with late=False",
        f"{_LATE}::test_what_is_refused",
    ),
    _switch(
        "open accumulation window",
        "gradients belong to the old layout",
        "put the boundary after engine.step()",
        "what_must_not_be_open_at_a_boundary",
    ),
    _switch(
        "engine.offload_states",
        "there is nothing to read in its place",
        "call engine.reload_states() before the switch",
        "tests/engine/test_offload.py::test_states_that_were_moved_away_are_refused",
    ),
    _switch(
        "requires_grad",
        "it has changed since it was registered",
        "call engine.update_param_groups() on every working member first",
        "tests/engine/test_register.py::test_refused_at_a_switch",
    ),
    _switch(
        "optimizer groups",
        "they are not those that were registered",
        "change them with engine.update_param_groups(groups=[...]) only",
        "tests/engine/test_register.py::test_refused_at_a_switch",
    ),
    _switch(
        "parameters",
        "they are not those of initialize",
        "add parameters before it, frozen if need be, and change their data in place",
        "tests/engine/test_register.py::test_refused_at_a_switch",
    ),
    _switch(
        "no_sync",
        "its gradients are not reduced yet",
        "leave the window and call engine.step() before the boundary",
        "what_must_not_be_open_at_a_boundary",
    ),
    _switch(
        "coalesce_grad_reduction",
        "its gradients are not reduced yet",
        "leave the window and call engine.step() before the boundary",
        f"{_WINDOWS}::test_an_open_window_is_named_and_stays_as_it_is",
    ),
    _switch(
        "a CUDA graph under capture",
        "it records addresses that a switch replaces; nothing detects a finished one ([GPUs](gpu.md))",
        "end the capture before the boundary, and capture anew in engine.on_switch",
        "no_switch_while_a_graph_is_captured",
    ),
    _switch(
        "GatheredParameters",
        "its parameters would change under it",
        "leave the block before the boundary",
        f"{_WINDOWS}::test_an_open_window_is_named_and_stays_as_it_is",
    ),
    _switch(
        "gradients without a step",
        "gradients belong to the old layout",
        "put the boundary after engine.step()",
        f"{_WINDOWS}::test_an_open_window_is_named_and_stays_as_it_is",
    ),
    Row(
        "set_gradient_accumulation_boundary",
        Verdict.NOTE,
        "in another world its middle would be other samples",
        "set it with the last micro-batch of a global batch, or call engine.step() after each",
        proof=f"{_WINDOWS}::test_boundaries_set_by_hand_follow_the_world",
    ),
    _works(
        "activation checkpointing",
        "deepspeed.checkpointing or torch's; random streams of get_cuda_rng_tracker() belong to the data index",
        "tests/engine/test_checkpointing_streams.py::test_kinds_of_checkpointing_agree",
    ),
    _works(
        "hooks",
        "on parameters and modules, and attributes of your own on them: the objects stay, so these do; names in "
        "ds_ are DeepSpeed's",
        "tests/engine/test_hooks.py::test_objects_attributes_and_hooks_stay",
    ),
    _works(
        "EMA",
        "update it inside GatheredParameters, which stage 3 needs, and give it to "
        "engine.register_for_checkpointing; keep no `parameter.data` over "
        "a switch, it is other memory then",
        "tests/engine/test_hooks.py::test_an_average_of_the_weights",
    ),
    _works(
        "no_sync around micro-batches",
        "DeepSpeed has it in stages 0 and 1 alone, and raises in the others",
        f"{_USAGE}::test_no_sync",
    ),
    _works(
        "groups and collectives of your own",
        "by engine.new_group; where members come and go they raise WorldChanged when one dies, see "
        "[elastic](elastic.md)",
        "tests/elastic/test_styles.py::test_collectives_and_groups_of_the_users_own",
    ),
    _works(
        "loss.backward()",
        "at stages 1 to 3, as in DeepSpeed; where members come and go it survives a death if the engine returned it",
        "tests/elastic/test_styles.py::test_backward_of_the_loss",
    ),
    _works(
        "several engines in one process",
        "each with a layout over all processes, and its own random streams; see [engines](members.md#several-engines)",
        f"{_ENGINES}::test_each_trains_as_if_alone",
    ),
    _works(
        "several engines where members come and go",
        "all of them in one transaction, at the boundaries of the first; see [engines](members.md#several-engines)",
        "tests/elastic/test_together.py::test_nodes_join_and_leave",
    ),
    _works("an optimizer or scheduler of your own", "", f"{_USAGE}::test_an_optimizer_of_the_users"),
)
