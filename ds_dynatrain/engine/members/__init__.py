"""Members come and go: how a process gets into a job, what follows when others come, leave or die.

| file | what it does |
|---|---|
| `entry`, `description` | how a process comes into a job; what has to be alike on all |
| `elastic`, `roll` | what a member hears of the others; their numbers |
| `policy` | which layout for so many members |
| `changes`, `change`, `leading` | what is done about it at a boundary, and what rank 0 does besides |
| `forming`, `survival`, `voiding` | after a failure: a new world, what is left of the state, the call that it came in |
"""
