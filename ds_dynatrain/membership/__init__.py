"""Agreement between members, and their actions when other members join, leave or die. Start with `boundary_machine`.

A *boundary* is the point between two optimizer steps. A *board* is a key-value store in which members post and read
records. The folder needs no engine: `boundary_machine` takes facts and returns actions, which `engine/driver` carries
out.

| file | role |
|---|---|
| `control`, `liveness` | the board, its records and their authors; which members are alive, and which are waited for |
| `session` | joint steps of members: make the same request, let the first one compute, combine values, vote |
| `proposal`, `agreement` | which member takes which rank in a switch; one decision for all |
| `boundary_machine` | decisions about a generation, without engines or boards: facts go in, actions come out |
| `destinations` | the layout of each engine in a new generation, and the member at each of its ranks |
| `whole`, `survival` | which copies make up a whole state; how much of the state is left after a death |
| `tally` | a member's reports to the coordinator: how its time was spent, how switches ended |

May import `adapters`, `config` and `elastic`.
"""
