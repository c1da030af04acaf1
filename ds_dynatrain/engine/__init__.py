"""The engine and the switch.

| file | what it does |
|---|---|
| `initialize` | the call that a user makes |
| `introduction`, `first_layout`, `construction` | what processes compare, the layout to begin with, the first world |
| `engine`, `core`, `calls/` | the object that a user holds, its ground, its calls by topic |
| `switcher` | asking, preparing, the boundary, the wait of an idle member |
| `agreement` | one decision from the same records on all members |
| `preparation` | what is made ready while training runs |
| `meeting` | what every switch is on one member: who meets, what is measured, how it ends |
| `transaction` | the switch itself: meet, drain, rebuild, move, verify, commit or roll back |
| `lean` | the same through a checkpoint, for when both sides do not fit |
| `certificate`, `census` | the proofs before a commit |
| `carry`, `encoding`, `streams` | state that is no tensor element |
| `control`, `liveness` | the notice board, and who is still there |
| `feasible` | what is refused when it is asked for |
| `summary` | the event of a switch |
| `surroundings` | what a member has around it in the present generation |
| `members/` | processes that come into a job, leave it, or die |
| `checkpoints/` | universal checkpoints of an engine |
"""
