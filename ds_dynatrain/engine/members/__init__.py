"""Members come and go: how a process gets into a job, what follows when others come, leave or die.

| file | what it does |
|---|---|
| `membership` | what engines ask of it, whichever it is: `fixed_launch`, or `elastic_membership` |
| `early`, `entry`, `description` | how a process comes into a job, with an engine or before; what is alike on all |
| `elastic`, `registry` | what a member hears of the others; their numbers |
| `boundaries`, `losses`, `discarded` | at a boundary; in a call that loses its world; in a discarded global batch |
| `change`, `actions` | what is decided about a generation, without engines or boards: what goes in, what comes out |
| `destinations`, `policy`, `survival` | who goes where; which layout for so many; what is left of the state |
| `executor`, `boards`, `joint_switch`, `restoring` | what was decided is done; boards; several engines; a checkpoint |
"""
