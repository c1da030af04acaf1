"""Objects that users hold, and decisions on when state moves to another layout; `ds_dynatrain.reshard` moves it.

An engine is one object, whose class grows file by file: `discarded` (batches to train again), `switcher` (switches, and
its place), `loaders`, `calls` (checkpoints) and `parts` (its begin and end, and its extensions). The user's object
(`dynatrain_engine`) holds it in one attribute. `checkpoints/` has an engine's universal checkpoints, `copies/` the
copies that members keep for each other. `ds_dynatrain/README.md` gives the order in which to read the files.

May import `reshard`; start with `dynatrain_engine`.
"""
