"""Objects that users hold, and decisions when the state is laid out anew; `ds_dynatrain.reshard` has the transaction.

Each part of an engine is made of the core and of what else it is given (`parts`); the user's object (`engine`) has
them on one attribute. `checkpoints/`: universal checkpoints of an engine. `copies/`: copies that members keep for
each other. `ds_dynatrain/README.md` lists the files, lowest layer first.
"""
