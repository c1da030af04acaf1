"""Trainer and Accelerate over engines whose world changes; users import `integrations.transformers` and `.accelerate`.

For both: `calls` makes the engine where these libraries ask DeepSpeed for one, `numbers` updates what Accelerate
remembers of the world, `carried` is the state that a newcomer takes over, `schedules` covers learning rates. Private
names of both libraries are in `names`, checked at import.

For a Trainer: `settings` reads its arguments, `refusals` lists what it cannot do, `checkpoints` finds and names
folders, `reporting` decides who logs, `callbacks` follows the steps, and `trainer` puts all of it under Trainer's
methods.

For an Accelerator: `accelerators` reads and refuses its arguments, `loaders` replace its DataLoaders, `collectives` are
those that a loop calls, `states` reads and writes the files beside a checkpoint.
"""
