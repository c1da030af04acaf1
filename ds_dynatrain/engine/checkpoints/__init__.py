"""Universal checkpoints of an engine: `ds_dynatrain.checkpoint` has the files, this has the state that goes in and out.

| file | what it does |
|---|---|
| `calls`, `asking` | what the calls that save and load do; what stands in their way, and that all ask for the same |
| `saving` | the state of all members into a checkpoint |
| `extra_state` | the carry of one: what all ranks share, what belongs to single ones; another tool's as ours |
| `restore`, `restoration`, `from_checkpoint` | out of one into the present layout; one member's part of that |
| `opening`, `sources`, `stock` | what is restored from: ours, converted, DeepSpeed's; which DeepSpeed loads itself |
| `resume` | what a job goes on from when it starts |
| `fallback`, `joint` | saves that the engine makes by itself; those of all engines together |
"""
