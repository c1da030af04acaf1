"""Trainer and Accelerate over engines whose world changes.

Users import `integrations.transformers` and `integrations.accelerate`.

For both libraries: `calls` makes the engine when these libraries ask DeepSpeed for one, `numbers` updates what
Accelerate remembers about the world, `carried` is the state that a new member takes over, and `schedules` covers
learning rates. Private names of both libraries are listed in `names` and checked at import.

For a Trainer: `settings` reads its arguments, `refusals` lists what it cannot do, `checkpoints` finds and names
folders, `reporting` decides who logs, `callbacks` follows the steps, and `trainer` puts all of it under Trainer's
methods.

For an Accelerator: `accelerators` reads its arguments and refuses some, `loaders` replaces its DataLoaders,
`collectives` are those that a loop calls, and `states` saves and loads its state, using the engine's checkpoints.
"""
