"""The engine and the switch.

| file | what it does |
|---|---|
| `initialize` | the call that a user makes |
| `engine` | the object that a user holds |
| `switcher` | asking, preparing, the boundary, the wait of an idle member |
| `agreement` | one decision from the same records on all members |
| `preparation` | what is made ready while training runs |
| `transaction` | the switch itself: meet, drain, rebuild, move, verify, commit or roll back |
| `certificate`, `census` | the proofs before a commit |
| `carry`, `encoding`, `streams` | state that is no tensor element |
| `control`, `liveness` | the notice board, and who is still there |
| `feasible` | what is refused when it is asked for |
| `summary` | the event of a switch |
| `entry`, `description`, `surroundings` | how a process comes into a job; what is alike on all; what is around it |
| `elastic`, `roll`, `policy` | members that come and go: what is heard; numbers; which layout for so many |
| `changes`, `change`, `leading` | what follows from it at a boundary |
| `forming`, `survival`, `voiding` | after a failure: a new world, what is left of the state, the call that it came in |
"""
