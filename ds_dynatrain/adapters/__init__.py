"""DeepSpeed's private layouts: the only place that touches a private name of DeepSpeed's or of torch.distributed's.

| file | what it knows |
|---|---|
| `names` | which private names are relied on; checked at import |
| `versions` | what differs between DeepSpeed's series |
| `support` | the table of `ds_dynatrain/support`, applied to live objects |
| `settings` | DeepSpeed's configuration of one layout |
| `start` | what surrounds an engine's constructor; who waits for a compilation says so |
| `worlds` | process groups of a world: build, install, drop |
| `model` | the logical tensors of a module and its optimizer groups |
| `rules` | which numbers of the configuration decide where ZeRO cuts |
| `fragments` | `param._hp_mapping`, set right where DeepSpeed links it wrong |
| `incoming` | parameters that come in one by one: models of `zero.Init` |
| `meta` | parameters on the meta device, drawn module by module |
| `regroup` | optimizer groups when what is trained changes |
| `schedulers` | a scheduler's lists with one entry per group |
| `optimizers` | which states an optimizer class keeps; what users register |
| `moments` | states of one tensor, read and written |
| `native` | what compiled optimizers keep for themselves |
| `memory` | buffers of a layout: their sizes, and which can stay |
| `hollow` | building an optimizer without memory or messages |
| `stage0`, `stage0_fused`, `stage12`, `bf16`, `stage3` | one kind of DeepSpeed state each; four verbs (see `state`) |
| `sequence` | Ulysses layers, and the sequence axis of an engine |
| `kinds` | what a model has in it that decides its layouts |
| `peers`, `process_groups`, `parallel_state` | who forms a group; groups by hand; what DeepSpeed keeps of a world |
| `process_wide` | what DeepSpeed sets once for a process, besides groups |
| `stages` | which of them an optimizer needs |
| `flat` | what those over flat groups have in common |
| `offload` | gradients that masters in host memory own; CPU optimizers |
| `scaler` | the loss scale, and what an optimizer has no place for |
| `gradients` | which parameters got a gradient |
| `tokens` | gradients by token counts |
| `windows` | which `GatheredParameters` blocks are open |
| `rng` | the random streams of activation checkpointing |
| `compiled` | what torch has compiled, and when it must be dropped |
| `curriculum` | DeepSpeed's curriculum as an order of samples |
| `pipeline`, `stage_module`, `grid` | stages of a `PipelineModule`: who has which layer, layers made anew, groups |
| `staged` | a `PipelineModule` of which each process has built its own stage |
| `template`, `children` | the user's model without memory; other children for a root that stays |
| `autotp`, `tensor` | what AutoTP does and says, asked without memory or peers; its layers on a root that stays |
| `forward` | the optimizer that `initialize` returns |
| `host`, `host_engine`, `pipeline_host` | what can be done to DeepSpeed's engines; the engines that are open to it |
"""

from ds_dynatrain.adapters.names import check_names

check_names()
