"""Copies of state that members keep for each other, from which a state can be restored after a death.

| file | role |
|---|---|
| `copy` | a copy of the state that only one rank held at one step, and a check that it is unchanged |
| `kept` | the copies that this process has, of its own rank and of others, in reused memory |
| `from_copies` | a restoration from copies |

May import `reshard`; start with `copy`.
"""
