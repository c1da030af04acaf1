"""Members that come and go: how a process enters a job, and what follows when others come, leave or die.

| file | what it does |
|---|---|
| `membership` | what engines ask of it; in the base class members never change |
| `fixed_launch`, `elastic_membership` | its two kinds |
| `entry` | how a process comes into a job, with an engine or before |
| `elastic` | what a member hears of the others |
| `boundaries`, `discarded` | at a boundary, and after a call that lost its world; in a discarded global batch |
| `change` | decisions about a generation, without engines or boards: facts go in, actions come out |
| `destinations`, `survival` | which member goes where, in which layout; how much of the state is left |
| `driver`, `joint_switch`, `restoring` | carrying the decisions out; several engines; restoring state |
"""
