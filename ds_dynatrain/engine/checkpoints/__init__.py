"""Universal checkpoints of an engine: how its state is saved and loaded. The format of the files is in
`ds_dynatrain.checkpoint`.

| file | role |
|---|---|
| `saving` | saves the state of all members into a checkpoint |
| `extra_state` | state besides the model's tensors, shared or per rank; converts other tools' checkpoints |
| `restore` | loads a checkpoint, when a user asks for it, when a job starts, and after a loss of state |
| `lean` | switches through a checkpoint if both sides do not fit into memory |
| `sources`, `other_tools` | what to restore from: our checkpoints, converted ones, DeepSpeed's |

May import `reshard`; start with `saving`.
"""
