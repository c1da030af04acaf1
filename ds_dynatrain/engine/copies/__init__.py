"""Copies of state that members keep for each other, from which a state can be restored after a death.

| file | role |
|---|---|
| `copy` | what one rank of a layout held alone at one step, and whether it is still that |
| `kept` | the copies that this process has, of itself and of others, in memory that is used again |
| `from_copies` | a restoration from copies |

May import `reshard`; start with `copy`.
"""
