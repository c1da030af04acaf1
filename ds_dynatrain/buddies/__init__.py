"""Buddies: what one rank holds alone is kept by another member, too, in host memory, so that a death loses little.

| file | |
|---|---|
| `extension` | when copies are taken, and what is seen of it: what the engine calls |
| `placement` | who keeps whose copies |
| `taking` | a copy is taken, and becomes bytes and a header |
| `shipping` | one engine's copies in its present world: a thread sends each, and keeps what comes |
| `rows` | what works, and what is refused |

What a copy is, where a process keeps it, and how a state is put together from copies: `engine/copies`.
"""
