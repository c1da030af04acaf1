"""Fallback checkpoints: saved automatically at boundaries, and loaded when a job has lost its state.

| file | |
|---|---|
| `extension` | the extension that the engine calls: decides when a checkpoint is due, and saves it |
| `joint_tags` | one tag for the checkpoints of all engines of a process |
| `config` | the `fallback` block |
| `rows` | rows of the support table |

`engine/checkpoints` restores from these checkpoints.

This package may import only `engine`. Begin reading at `extension`.
"""
