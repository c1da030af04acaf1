"""Universal checkpoints of an engine: the state that is saved and loaded; the files are in `ds_dynatrain.checkpoint`.

| file | role |
|---|---|
| `asking` | agreement on a save or a load: nothing prevents it, and all members make the same request |
| `saving` | saves the state of all members into a checkpoint |
| `extra_state` | the extra state in a checkpoint (the carry), shared or per rank; converts another tool's |
| `restore`, `lean` | loads a checkpoint into the current layout; switches through one if both sides do not fit |
| `sources`, `other_tools`, `stock_folder` | what to restore from: ours, converted, DeepSpeed's, or left to DeepSpeed |
| `resume` | the state from which a job starts |
| `joint` | the newest checkpoint that all engines of a process have |

May import `reshard`; start with `saving`.
"""
