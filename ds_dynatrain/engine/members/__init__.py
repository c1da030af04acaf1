"""Members come and go: how a process gets into a job, what follows when others come, leave or die.

| file | what it does |
|---|---|
| `early`, `entry`, `description` | how a process comes into a job, with an engine or before; what is alike on all |
| `elastic`, `roll` | what a member hears of the others; their numbers |
| `policy` | which layout for so many members |
| `changes`, `change`, `leading` | what is done about it at a boundary, and what rank 0 does besides |
| `forming`, `survival` | after a failure: a new world, what is left of the state |
| `voiding`, `loss` | the call that it came in, among them `backward` of a loss |
"""
