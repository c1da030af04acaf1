"""Members come and go: how a process gets into a job, what follows when others come, leave or die.

| file | what it does |
|---|---|
| `membership` | what engines ask of it; in the base nobody comes or goes |
| `fixed_launch`, `elastic_membership` | the two kinds of it |
| `entry` | how a process comes into a job, with an engine or before |
| `elastic` | what a member hears of the others |
| `boundaries`, `discarded` | at a boundary, and after a call that lost its world; in a discarded global batch |
| `change` | what is decided about a generation, without engines or boards: what goes in, what comes out |
| `destinations`, `survival` | who goes where, in which layout; what is left of the state |
| `driver`, `joint_switch`, `restoring` | what was decided is done; several engines; a checkpoint |
"""
