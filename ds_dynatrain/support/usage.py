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
        "tested on a device without hardware; what ran on GPUs, and what never did: see [GPUs](gpu.md)",
    ),
    _start(
        "an elastic launch on an accelerator without NCCL",
        "only with NCCL is it known how to end a collective whose member died",
        "launch a fixed number of nodes (no MIN:MAX), or set DS_ACCELERATOR=cpu",
    ),
    _start(
        "an elastic launch with an old NCCL",
        "before 2.26.2 an abort after a death may hang",
        "take a newer one, launch a fixed number of nodes (no MIN:MAX), or set DS_ACCELERATOR=cpu",
    ),
    _start(
        "several devices in one process",
        "a process has one device",
        "start a process for each device, with torchrun --nproc-per-node",
    ),
    _switch(
        "CPU optimizers at stage 0 on an accelerator",
        "at stage 0 DeepSpeed offloads nothing, and its CPU optimizer cannot step weights on the device",
        "take stage 1 to 3, or leave offload_optimizer out",
    ),
    _works(
        "PipelineModule",
        "built in stages, or with num_stages=1 and dynatrain.layout.pipe: see [pipelines](pipeline.md)",
    ),
    _works(
        "training_data of a pipeline",
        "read in its own order, as in DeepSpeed; an epoch that is no whole number of global batches needs "
        "dataloader_drop_last: see [pipelines](pipeline.md#batches)",
    ),
    _works(
        "train_batch, set_dataiterator, set_dataloader of a pipeline with an iterator of one's own",
        "it serves until a switch changes pipe, data, shares or the members, then train_batch asks for another one: "
        "see [pipelines](pipeline.md#batches)",
    ),
    _works(
        "pipelines side by side with different numbers of micro-batches",
        "by layout.shares, or where data does not divide them; refused with BatchNorm, with experts that drop tokens "
        "and with an expert axis: see [pipelines](pipeline.md#batches)",
    ),
    _works(
        "layers of deepspeed.moe in a pipeline",
        "stages and the expert size change together; a stage may be without experts: see [pipelines](pipeline.md)",
    ),
    _works(
        "a pipeline in bf16 without ZeRO",
        "DeepSpeed's stage 0 is then BF16_Optimizer: cut as stage 1, gradients accumulated in bf16",
    ),
    _switch(
        "options of ZeRO for a pipeline in bf16 without it",
        "BF16_Optimizer, which DeepSpeed takes there, knows no round_robin_gradients, parameter_alignment or offload",
        "leave the key out, or take zero_stage=1",
    ),
    _works(
        "a pipeline in fp16, or with CPU offload",
        "",
    ),
    _switch(
        "stages in fp16 without ZeRO",
        "DeepSpeed clips by the norm of the first stage alone, and hangs where one has no parameter of a group",
        "take zero_stage=1, or pipe=1",
    ),
    _works(
        "torch_autocast with a pipeline",
        "plain DeepSpeed reads gradients of activations in a wrong type on stages that receive fp32 and send bf16; "
        "here it does not",
    ),
    _start(
        "data_efficiency beside a pipeline",
        "data_efficiency is not followed with a PipelineModule yet",
        "leave it out",
    ),
    _works(
        "AutoEP in a pipeline",
        "with a moe_layer_pattern for names as 3.mlp, of a layer's number in the whole model; a stage may be without "
        "experts: see [pipelines](pipeline.md)",
    ),
    _works(
        "engine.compile of a pipeline",
        "compiles layer by layer, also after a switch; layers that you compiled yourself are no longer compiled "
        "after a change of stages",
    ),
    _start(
        "engine.micro_batch of a pipeline",
        "train_batch draws the micro-batches of a global batch itself",
        "call engine.train_batch()",
    ),
    _works(
        "mpu for sequence parallelism",
        "one with get_sequence_parallel_group, such as DeepSpeed's parallel_state_sp; see [sequence](sequence.md)",
    ),
    _start(
        "mpu",
        "only sequence parallelism is taken from an mpu",
        "leave it out: tensor and pipeline sizes belong into dynatrain.layout",
    ),
    _start(
        "mesh_param",
        "under DeepSpeed's mesh ZeRO reduces over data ranks alone: the parameters of sequence ranks drift apart",
        "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead",
    ),
    _start(
        "UlyssesSPAttentionHF",
        "it keeps the sizes of its first layout, out of reach of the module",
        "use deepspeed.sequence.layer.DistributedAttention in the model",
    ),
    _start("FPDT", "its layers were not tried", "use deepspeed.sequence.layer.DistributedAttention"),
    _works(
        "layers of deepspeed.moe",
        "built with the ep_size of the start, or with 1; see [experts](experts.md)",
    ),
    _switch(
        "options of ZeRO beside experts",
        "with experts DeepSpeed's stages 1 and 2 have no reduce_scatter false, and stage 2 no contiguous_gradients "
        "false (but with offload)",
        "leave the key out",
    ),
    _start(
        "experts of your own",
        "it has DeepSpeed's mark (allreduce=False) and is in no layer of deepspeed.moe",
        "use AutoEP, or remove the dynatrain block",
    ),
    _start(
        "no optimizer",
        "there is nothing to train with",
        "pass one to initialize, or put an `optimizer` block in",
    ),
    _works(
        "zero.Init",
        "at any stage; not from NVMe, quantized, or with a group of its own; in an elastic launch call "
        "ds_dynatrain.init_distributed() first",
    ),
    _start(
        "zero.Init beside an engine where members come and go",
        "the processes over which it cuts parameters may change",
        "build all models before the first initialize, or this one whole",
    ),
    _works(
        "meta device",
        "drawn by each module's reset_parameters() or by param_init_fn=; buffers must be real",
    ),
    _start(
        "element types",
        "a model has float32 parameters, or those of the bf16 or fp16 block",
        "convert the parameter, or enable the block",
    ),
    _start("sparse gradients", "not supported", "build the embedding with sparse=False"),
    _works(
        "engine.compile",
        "or module.compile(), on every process; each switch drops compiled code, and the next step compiles again "
        "(the event's recompile_ms, after the pause)",
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
        "it was not tried: it traces DeepSpeed's reduction hooks too",
        "leave compiled_autograd_enabled out",
    ),
    _start(
        "set_train_batch_size",
        "batch sizes are settled for the whole job",
        "give them at the start",
    ),
    _start(
        "set_train_micro_batch_size",
        "batch sizes are settled for the whole job",
        "give them at the start",
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
        "an idle one waits in its loader, a switch ends the engine's groups",
        "give all work, hold a frozen model without ZeRO-3, or destroy it",
    ),
    _start(
        "a model of another engine in ZeRO-3",
        "that engine has cut its parameters apart",
        "call engine.destroy() there and build the model anew, or switch that engine's stage instead",
    ),
    _start(
        "one backward pass through two engines",
        "DeepSpeed handles one engine's gradients at a time, and autograd mixes them",
        "call backward() on each loss, or detach what passes between engines",
    ),
    _start(
        "lean switches where members come and go",
        "for a while only a checkpoint has the state, and a death then is not handled yet",
        'use "rollback" there',
    ),
    _works(
        "late switches",
        "masters and moments move during the first global batch; see [late switches](switching.md)",
    ),
    _works(
        "late switches where members come and go",
        "where one cannot be late, members come and go without it; see [elastic jobs](dev/elastic-protocol.md#late)",
    ),
    _start(
        "an order of tensors by owners",
        "the order is chosen over data and sequence ranks alone, and DeepSpeed before 0.19.8 cannot link masters",
        'leave "owners" out of the dynatrain block',
    ),
    _switch(
        "late lean switches",
        'under "safety": "lean" the source is freed before the target is built',
        'use "rollback", or leave dynatrain.late out',
    ),
    _switch(
        "late switches beside another engine",
        "a void global batch of one engine does not undo the other engine's steps",
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
        "a global batch that becomes void is dealt again, which a loop of your own cannot do",
        "take engine.loader(dataset), or switch with late=False",
    ),
    _switch(
        "open accumulation window",
        "gradients belong to the old layout",
        "put the boundary after engine.step()",
    ),
    _switch(
        "engine.offload_states",
        "there is nothing to read in its place",
        "call engine.reload_states() before the switch",
    ),
    _switch(
        "requires_grad",
        "it has changed since it was registered",
        "call engine.update_param_groups() on every working member first",
    ),
    _switch(
        "optimizer groups",
        "they are not those that were registered",
        "change them with engine.update_param_groups(groups=[...]) only",
    ),
    _switch(
        "parameters",
        "they are not those of initialize",
        "add parameters before it, frozen if need be, and change their data in place",
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
        "it records addresses that a switch replaces; nothing detects a finished one ([GPUs](gpu.md))",
        "end the capture before the boundary, and capture anew in engine.on_switch",
    ),
    _switch(
        "GatheredParameters",
        "its parameters would change under it",
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
        "in another world its middle would be other samples",
        "set it with the last micro-batch of a global batch, or call engine.step() after each",
    ),
    _works(
        "activation checkpointing",
        "deepspeed.checkpointing or torch's; random streams of get_cuda_rng_tracker() belong to the data index",
    ),
    _works(
        "hooks",
        "on parameters and modules, and attributes of your own on them: the objects stay, so these do; names in "
        "ds_ are DeepSpeed's",
    ),
    _works(
        "EMA",
        "update it inside GatheredParameters, which stage 3 needs, and give it to "
        "engine.register_for_checkpointing; keep no `parameter.data` over "
        "a switch, it is other memory then",
    ),
    _works(
        "no_sync around micro-batches",
        "DeepSpeed has it in stages 0 and 1 alone, and raises in the others",
    ),
    _works(
        "groups and collectives of your own",
        "by engine.new_group; where members come and go they raise WorldChanged when one dies, see "
        "[elastic](elastic.md)",
    ),
    _works(
        "loss.backward()",
        "at stages 1 to 3, as in DeepSpeed; where members come and go it survives a death if the engine returned it",
    ),
    _works(
        "several engines in one process",
        "each with a layout over all processes, and its own random streams; see [engines](members.md#several-engines)",
    ),
    _works(
        "several engines where members come and go",
        "all of them in one transaction, at the boundaries of the first; see [engines](members.md#several-engines)",
    ),
    _works("an optimizer or scheduler of your own", ""),
)
