"""Buddies: members that keep, in host memory, copies of state that only one rank holds, so that a death loses little.

| file | |
|---|---|
| `extension` | the extension that the engine calls: when copies are taken, and what users see of them |
| `assignment` | which rank keeps the copies of which other ranks |
| `taking` | takes a copy, and turns it into bytes and a header |
| `shipping` | one round: sends a copy from a thread, and keeps those that arrive |
| `config`, `rows` | the `buddies` block; supported and refused uses |

A *ward* of a member is another member whose copies it keeps. `engine/copies` defines a copy, where a process keeps it,
and how a state is put together from copies.

This package may import only `engine`. Begin reading at `extension`.
"""
