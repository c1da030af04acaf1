"""Universal checkpoints of an engine: the state that is saved and loaded; the files are in `ds_dynatrain.checkpoint`.

| file | role |
|---|---|
| `asking` | agreement on a save or a load: nothing stands in the way, and all members ask for the same |
| `saving` | saves the state of all members into a checkpoint |
| `extra_state` | the extra state in a checkpoint (the carry), shared or per rank; converts another tool's |
| `restore`, `lean` | load a checkpoint into the present layout; switch by way of one if both sides do not fit |
| `sources`, `other_tools`, `stock_folder` | what to restore from: ours, converted, DeepSpeed's, or left to DeepSpeed |
| `resume` | state that a job starts from |
| `joint` | the newest checkpoint that all engines of a process have |

May import `reshard`; start with `saving`.
"""
