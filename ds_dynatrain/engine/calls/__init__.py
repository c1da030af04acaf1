"""The engine's calls, by what they are about; `engine.DynatrainEngine` has them all.

- `data`: loaders, what they deal, epochs, means over the data axis
- `training`: forward, backward and step, which survive a death
- `groups`: process groups of the user's own
- `checkpoints`: saving and loading
- `ending`: the end of the script
"""
