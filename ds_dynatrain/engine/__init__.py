"""Objects that users hold, and decisions on when state moves to another layout (`ds_dynatrain.reshard` then moves it).

An engine's state and calls are in one object. Its class is built up in a chain of base classes, one per file:
`discarded` (repeats discarded batches), `switcher` (switches, and reports of changes), `loaders`, `calls` (checkpoints)
and `parts` (begin, end and extensions). The object that users hold (`dynatrain_engine`) keeps it in one attribute.
`checkpoints/` has an engine's universal checkpoints, `copies/` the copies that members keep for each other.
`ds_dynatrain/README.md` gives the order in which to read the files.

May import `reshard`; start with `dynatrain_engine`.
"""
