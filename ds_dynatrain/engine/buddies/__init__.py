"""Buddies: what one rank holds alone is kept by another member, too, in host memory, so that a death loses little.

| file | role |
|---|---|
| `copy` | what one rank of a layout held alone at one step, and whether it is still that |
| `kept` | the copies that this process has, of itself and of others, in memory that is used again |
| `message` | a copy as bytes and a header |
| `taking` | a copy is taken, at a boundary |
| `shipping` | one round of copies on their way, in a thread |
| `keeper` | one engine's copies in its present world |
| `whole` | after a death: which copies make up a whole state, of all engines at one moment |
| `from_copies` | a restoration from them |
| `buddies` | when copies are taken, who keeps them, and what is seen of it |
"""
