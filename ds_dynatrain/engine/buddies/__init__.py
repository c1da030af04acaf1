"""Buddies: what one rank holds alone is kept by another member, too, in host memory, so that a death loses little.

| file | role |
|---|---|
| `copy` | what one rank of a layout held alone at one step, and whether it is still that |
| `kept` | the copies that this process has, of itself and of others, in memory that is used again |
| `message` | a copy as bytes and a header |
| `taking` | a copy is taken, at a boundary |
| `shipping` | one round of copies on their way, in a thread |
| `keeper` | one engine's copies in its present world |
| `keeping` | what an idle member keeps of those that work |
| `links` | a working member's links to idle ones |
| `pairing` | who keeps whose copies in a world at present: those that work, or idle ones, too |
| `whole` | after a death: which copies make up a whole state, of all engines at one moment |
| `from_copies` | a restoration from them |
| `buddies` | when there is one, with whom, and what is seen of it |
"""
