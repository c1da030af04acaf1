"""Clocks of members that wait: lowered as far as steps do not last longer, to save energy.

| file | |
|---|---|
| `extension` | the extension that the engine calls: sets this member's clock after a timing window of balance |
| `clock_search` | the bisection for the clocks of all ranks, as arithmetic on measured seconds |
| `actuator` | what sets a clock: `dry`, `zeus` or a class of the user's |
| `watcher` | the process that gives a clock back after its member has died |
| `config` | the `clocks` block |
| `rows` | rows of the support table |

May import `balance`; start with `extension`.
"""
