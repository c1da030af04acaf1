"""Universal checkpoints of an engine: the state that is saved and loaded; the files are in `ds_dynatrain.checkpoint`.

| file | role |
|---|---|
| `saving` | saves the state of all members into a checkpoint |
| `extra_state` | the extra state in a checkpoint (the carry), shared or per rank; converts another tool's |
| `restore` | loads a checkpoint, when a user asks for it, when a job starts, and after a loss of state |
| `lean` | switches through a checkpoint if both sides do not fit into memory |
| `sources`, `other_tools` | what to restore from: ours, converted, DeepSpeed's |

May import `reshard`; start with `saving`.
"""
