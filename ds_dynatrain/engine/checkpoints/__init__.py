"""Universal checkpoints of an engine: the state that goes in and out; the files are in `ds_dynatrain.checkpoint`.

| file | role |
|---|---|
| `calls`, `asking` | what the calls that save and load do; what stands in their way, and that all ask for the same |
| `saving` | the state of all members into a checkpoint |
| `extra_state` | the carry of one: what all ranks share, what belongs to single ones; another tool's as ours |
| `restore`, `restoration` | out of one into the present layout; one member's part of that |
| `opening`, `sources`, `stock` | what to restore from: ours, converted, DeepSpeed's; which DeepSpeed loads itself |
| `resume` | what a job goes on from when it starts |
| `fallback`, `joint` | saves that the engine makes by itself; those of all engines together |
"""
