"""Objects that users hold, and decisions on when state moves to another layout; `ds_dynatrain.reshard` moves it.

An engine consists of parts (`parts`), each of which receives the engine's core and the parts that it needs. The user's
object (`dynatrain_engine`) holds them in one attribute. `checkpoints/` has an engine's universal checkpoints, `copies/`
the copies that members keep for each other. `ds_dynatrain/README.md` gives the order in which to read the files.

May import `reshard`; start with `dynatrain_engine`.
"""
