"""The rows of the support table for uses of DeepSpeed outside its configuration.

`adapters/deepspeed/support_checks.py` detects refused uses.
"""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict


def _start(name: str, why: str, instead: str) -> Row:
    return Row(name, Verdict.AT_START, why, instead)


def _switch(name: str, why: str, instead: str) -> Row:
    return Row(name, Verdict.AT_SWITCH, why, instead)


def _works(name: str, why: str) -> Row:
    return Row(name, Verdict.NOTE if why else Verdict.WORKS, why)


USAGE = (
    _works(
        "accelerator",
        "tested on host memory that acts as a device; what ran on GPUs: see [GPUs](gpu.md)",
    ),
    _start(
        "an elastic launch on an accelerator without NCCL",
        "only NCCL is known to abort a collective whose member died",
        "launch a fixed number of nodes (no MIN:MAX), or set DS_ACCELERATOR=cpu",
    ),
    _start(
        "an elastic launch with an old NCCL",
        "before 2.26.2 an abort after a death may hang",
        "use a newer NCCL, launch a fixed number of nodes (no MIN:MAX), or set DS_ACCELERATOR=cpu",
    ),
    _start(
        "several devices in one process",
        "a process has one device",
        "start a process for each device, with torchrun --nproc-per-node",
    ),
    _switch(
        "CPU optimizers at stage 0 on an accelerator",
        "at stage 0 DeepSpeed offloads nothing, and its CPU optimizer cannot step weights on the device",
        "use stage 1 to 3, or leave offload_optimizer out",
    ),
    _works(
        "PipelineModule",
        "built in stages, or with num_stages=1 and dynatrain.layout.pipe: see [pipelines](pipeline.md)",
    ),
    _works(
        "training_data of a pipeline",
        "read in its own order, as in DeepSpeed; an epoch that does not end with a full global batch needs "
        "dataloader_drop_last: see [pipelines](pipeline.md#batches)",
    ),
    _works(
        "train_batch, set_dataiterator, set_dataloader of a pipeline with an iterator of one's own",
        "the iterator is used until a switch changes pipe, data, shares or the members; then train_batch asks for a "
        "new one: see [pipelines](pipeline.md#batches)",
    ),
    _works(
        "pipelines side by side with different numbers of micro-batches",
        "set by layout.shares, or if data does not divide them; refused with BatchNorm, experts that drop tokens, "
        "and an expert axis: see [pipelines](pipeline.md#batches)",
    ),
    _works(
        "layers of deepspeed.moe in a pipeline",
        "stages and the expert size can change together; a stage may have no experts: see [pipelines](pipeline.md)",
    ),
    _works(
        "a pipeline in bf16 without ZeRO",
        "at stage 0 DeepSpeed then uses BF16_Optimizer, which partitions state as stage 1 does and accumulates "
        "gradients in bf16",
    ),
    _switch(
        "options of ZeRO for a pipeline in bf16 without it",
        "DeepSpeed then uses BF16_Optimizer, which has no round_robin_gradients, parameter_alignment or offload",
        "leave the key out, or use zero_stage=1",
    ),
    _works(
        "a pipeline in fp16, or with CPU offload",
        "",
    ),
    _switch(
        "stages in fp16 without ZeRO",
        "DeepSpeed clips by the norm of only the first stage, and hangs if a stage has no parameter of a group",
        "use zero_stage=1, or pipe=1",
    ),
    _works(
        "torch_autocast with a pipeline",
        "stages that receive fp32 and send bf16 read gradients in the right type, which plain DeepSpeed does not",
    ),
    _start(
        "data_efficiency beside a pipeline",
        "data_efficiency is not supported with a PipelineModule yet",
        "leave it out",
    ),
    _works(
        "AutoEP in a pipeline",
        "needs a moe_layer_pattern for names such as 3.mlp, with the layer's number in the whole model; a stage may "
        "have no experts: see [pipelines](pipeline.md)",
    ),
    _works(
        "engine.compile of a pipeline",
        "compiles layer by layer, also after a switch; after a change of stages, layers that you compiled yourself "
        "are no longer compiled",
    ),
    _start(
        "engine.micro_batch of a pipeline",
        "train_batch draws the micro-batches of a global batch itself",
        "call engine.train_batch()",
    ),
    _works(
        "mpu for sequence parallelism",
        "an mpu that has get_sequence_parallel_group, such as DeepSpeed's parallel_state_sp; see "
        "[sequence](sequence.md)",
    ),
    _start(
        "mpu",
        "only sequence parallelism is taken from an mpu",
        "leave it out: tensor and pipeline sizes belong in dynatrain.layout",
    ),
    _start(
        "mesh_param",
        "with DeepSpeed's mesh, ZeRO would reduce only over data ranks, and parameters of sequence ranks would drift "
        "apart",
        "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead",
    ),
    _start(
        "UlyssesSPAttentionHF",
        "it keeps the sizes of its first layout, where a switch cannot change them",
        "use deepspeed.sequence.layer.DistributedAttention in the model",
    ),
    _start("FPDT", "its layers were not tried", "use deepspeed.sequence.layer.DistributedAttention"),
    _works(
        "layers of deepspeed.moe",
        "build them with the initial expert size as ep_size, or with ep_size=1; see [experts](experts.md)",
    ),
    _switch(
        "options of ZeRO beside experts",
        "with experts DeepSpeed does not support reduce_scatter false at stages 1 and 2, or contiguous_gradients "
        "false at stage 2 without offload",
        "leave the key out",
    ),
    _start(
        "experts of your own",
        "the parameter has DeepSpeed's mark of experts (allreduce=False) and is in no layer of deepspeed.moe",
        "use AutoEP, or remove the dynatrain block",
    ),
    _start(
        "no optimizer",
        "there is nothing to train with",
        "pass one to initialize, or put an `optimizer` block in",
    ),
    _works(
        "zero.Init",
        "at any stage; refused with NVMe, quantized parameters or its own group; in an elastic launch call "
        "ds_dynatrain.init_distributed() first",
    ),
    _start(
        "zero.Init beside an engine where members come and go",
        "the processes over which it partitions parameters may change",
        "build all models before the first initialize, or this one without zero.Init",
    ),
    _works(
        "meta device",
        "each module's reset_parameters() sets the values, or else param_init_fn=; buffers must not be on the meta "
        "device",
    ),
    _start(
        "element types",
        "each parameter must be float32, or of the type of the bf16 or fp16 block",
        "convert the parameter, or enable the block",
    ),
    _start("sparse gradients", "not supported", "build the embedding with sparse=False"),
    _works(
        "engine.compile",
        "call it, or module.compile(), on every process; a switch drops compiled code, and the next step compiles "
        "again (`recompile_ms` of the event)",
    ),
    _switch(
        "torch.compile",
        "at stage 3 DeepSpeed's first forward pass fails in a wrapped module (stages 0 to 2 work)",
        "use module.compile() or engine.compile(), which wrap nothing",
    ),
    _start(
        "DeepCompile",
        "its passes build one layout's communication into the graph",
        "compile with engine.compile() alone",
    ),
    _start(
        "compiled autograd",
        "it also traces DeepSpeed's reduction hooks, which was not tried",
        "leave compiled_autograd_enabled out",
    ),
    _start(
        "set_train_batch_size",
        "batch sizes are fixed for the whole job",
        "set them in the configuration",
    ),
    _start(
        "set_train_micro_batch_size",
        "batch sizes are fixed for the whole job",
        "set them in the configuration",
    ),
    _start(
        "a pipeline beside another engine where members come and go",
        "a pipeline repeats a lost global batch by itself, without the other engine",
        "make the pipeline's engine first, or launch without the dynatrain rendezvous",
    ),
    _start(
        "idle processes beside another engine",
        "an idle process waits in its loader and misses the steps of the other engine",
        "give each engine a layout over all processes",
    ),
    _start(
        "a plain engine beside idle processes",
        "idle processes wait in their loader; a switch destroys the plain engine's groups",
        "give all work, hold a frozen model without ZeRO-3, or destroy it",
    ),
    _start(
        "a model of another engine in ZeRO-3",
        "that engine has partitioned its parameters",
        "call engine.destroy() on that engine and build the model again, or switch that engine's stage instead",
    ),
    _start(
        "one backward pass through two engines",
        "DeepSpeed handles one engine's gradients at a time, and autograd mixes them",
        "call backward() on each loss, or detach what passes between engines",
    ),
    _start(
        "lean switches where members come and go",
        "for a while only a checkpoint has the state, and a death during that time is not handled yet",
        'use "rollback" there',
    ),
    _works(
        "late switches",
        "masters and moments move during the first global batch; see [late switches](switching.md)",
    ),
    _works(
        "late switches where members come and go",
        "a change that cannot be late is an ordinary one; see [elastic jobs](dev/elastic-protocol.md#late)",
    ),
    _start(
        "an order of tensors by owners",
        "orders are chosen only among data and sequence ranks, and DeepSpeed before 0.19.8 cannot link masters to "
        "parameters",
        "leave dynatrain.owners out",
    ),
    _switch(
        "late lean switches",
        'with "safety": "lean" the old state is freed before the new state is built',
        'use "rollback", or leave dynatrain.late out',
    ),
    _switch(
        "late switches beside another engine",
        "discarding a global batch of one engine does not undo the other engine's steps",
        "leave dynatrain.late out, or switch with late=False",
    ),
    _switch(
        "late switches of other axes",
        "they were not tried with a pipe, expert, tensor or sequence axis",
        "switch with late=False",
    ),
    _switch(
        "late switches with Muon",
        "its momentum is read and written in the backward pass",
        "switch with late=False",
    ),
    _switch(
        "late switches without a loader",
        "a discarded global batch is repeated, which a loop of your own cannot do",
        "use engine.loader(dataset), or switch with late=False",
    ),
    _switch(
        "open accumulation window",
        "gradients belong to the old layout",
        "put the boundary after engine.step()",
    ),
    _switch(
        "engine.offload_states",
        "the states are not where a switch reads them",
        "call engine.reload_states() before the switch",
    ),
    _switch(
        "requires_grad",
        "it has changed since it was registered",
        "call engine.update_param_groups() on every working member first",
    ),
    _switch(
        "optimizer groups",
        "they differ from the registered groups",
        "change them with engine.update_param_groups(groups=[...]) only",
    ),
    _switch(
        "parameters",
        "they differ from those that initialize got",
        "add parameters before initialize, frozen if necessary, and change their data in place",
    ),
    _switch(
        "no_sync",
        "its gradients are not reduced yet",
        "leave the window and call engine.step() before the boundary",
    ),
    _switch(
        "coalesce_grad_reduction",
        "its gradients are not reduced yet",
        "leave the window and call engine.step() before the boundary",
    ),
    _switch(
        "a CUDA graph under capture",
        "it records addresses that a switch changes; graphs captured earlier are not detected ([GPUs](gpu.md))",
        "end the capture before the boundary; capture again in engine.on_switch",
    ),
    _switch(
        "GatheredParameters",
        "a switch would change the gathered parameters",
        "leave the block before the boundary",
    ),
    _switch(
        "gradients without a step",
        "gradients belong to the old layout",
        "put the boundary after engine.step()",
    ),
    Row(
        "set_gradient_accumulation_boundary",
        Verdict.NOTE,
        "a step inside a global batch would train other samples in another world",
        "set it at a global batch's last micro-batch, or always call engine.step()",
    ),
    _works(
        "activation checkpointing",
        "by deepspeed.checkpointing or by torch; random streams of get_cuda_rng_tracker() belong to the data index",
    ),
    _works(
        "hooks",
        "hooks on parameters and modules, and your attributes of them, stay, because the objects stay; names that "
        "begin with ds_ are DeepSpeed's",
    ),
    _works(
        "EMA",
        "update it inside GatheredParameters, for stage 3; give it to engine.register_for_checkpointing; do not keep "
        "`parameter.data` across a switch, which replaces that memory",
    ),
    _works(
        "no_sync around micro-batches",
        "only in stages 0 and 1; DeepSpeed raises an error in the others",
    ),
    _works(
        "groups and collectives of your own",
        "create groups with engine.new_group; in an elastic job, collectives raise WorldChanged when a member dies, "
        "see [elastic](elastic.md)",
    ),
    _works(
        "loss.backward()",
        "at stages 1 to 3, as in DeepSpeed; in an elastic job it survives a death only if the engine returned the loss",
    ),
    _works(
        "several engines in one process",
        "each with a layout over all processes, and its own random streams; see [engines](members.md#several-engines)",
    ),
    _works(
        "several engines where members come and go",
        "members come and go for all engines at once, at the boundaries of the first one; see "
        "[engines](members.md#several-engines)",
    ),
    _works("an optimizer or scheduler of your own", ""),
)
