"""Objects that users hold, and decisions when the state is laid out anew; `ds_dynatrain.reshard` has the transaction.

Each part of an engine is made of the core and of what else it is given (`parts`); the user's object
(`dynatrain_engine`) has them on one attribute.
`checkpoints/`: universal checkpoints of an engine. `copies/`: copies that members keep for
each other. `ds_dynatrain/README.md` says in which order to read them.

May import `reshard`; start with `dynatrain_engine`.
"""
