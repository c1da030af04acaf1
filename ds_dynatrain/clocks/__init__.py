"""Extension that saves energy: lowers device clocks of members that wait for slower ones, while steps take no longer.

| file | |
|---|---|
| `extension` | the extension that the engine calls: sets this member's clock after `balance` has timed some steps |
| `clock_search` | the bisection for the clocks of all ranks, as arithmetic on measured seconds |
| `actuator` | the classes that set a clock: for `dry`, for `zeus`, and the base class of the user's own |
| `watcher` | the process that removes the limit on a clock after its member has died |
| `config` | the `clocks` block |
| `rows` | rows of the support table |

This package may import only `balance`. Begin reading at `extension`.
"""
