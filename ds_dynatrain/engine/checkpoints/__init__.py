"""Universal checkpoints of an engine: the state that goes in and out; the files are in `ds_dynatrain.checkpoint`.

| file | role |
|---|---|
| `asking` | what stands in the way of a save or a load, and that all ask for the same |
| `saving` | the state of all members into a checkpoint |
| `extra_state` | the carry of one: what all ranks share, what belongs to single ones; another tool's as ours |
| `restore`, `lean` | out of one into the present layout; a switch through one, for when both sides do not fit |
| `sources`, `other_tools`, `stock_folder` | what to restore from: ours, converted, DeepSpeed's, or left to DeepSpeed |
| `resume` | what a job goes on from when it starts |
| `joint` | the newest checkpoint of all engines of a process |

May import `reshard`; start with `saving`.
"""
