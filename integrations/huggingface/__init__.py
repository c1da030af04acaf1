"""Trainer and Accelerate over engines whose world changes; `integrations.transformers` and `.accelerate` are its doors.

For both: `calls` makes the engine where these libraries ask DeepSpeed for one, `numbers` keeps what Accelerate
remembers of the world, `carried` is what a newcomer takes over, `schedules` those of the learning rate. Private names
of both libraries are in `names`, checked at import.

A Trainer's: `settings` reads its arguments, `refusals` says what cannot be, `checkpoints` finds and names folders,
`reporting` says who logs, `callbacks` follows the steps, and `trainer` puts it all under its methods.

An Accelerator's: `accelerators` reads what it was given and says what cannot be, `loaders` are what its DataLoaders
become, `collectives` are those that a loop calls, `states` reads and writes what lies beside a checkpoint.
"""
