"""How members agree, and what they do at a boundary when others come, leave or die; start with `boundary_machine`.

It needs no engine: a change of world goes in as facts and comes out as actions, which `engine/driver` carries out.

| file | role |
|---|---|
| `control`, `liveness` | the board, the records on it and who wrote them; who is alive, and who is waited for |
| `session` | what members do together: ask alike, let the first one compute, add up what all say, vote |
| `proposal`, `agreement` | who goes where in a switch; one decision for all |
| `boundary_machine` | decisions about a generation, without engines or boards: facts go in, actions come out |
| `destinations` | which member goes where, in which layout |
| `whole`, `survival` | which copies make up a whole state; how much of the state is left after a death |
| `tally` | what a member tells the coordinator: what its time goes into, how switches went |

May import `adapters`, `config` and `elastic`.
"""
