"""Trainer and Accelerate over engines whose world changes; `integrations.transformers` and `.accelerate` are its doors.

`calls` makes the engine where these libraries ask DeepSpeed for one, `settings` reads what they were given, `refusals`
says what cannot be, `batches` is the loader that they iterate over, `numbers` keeps what they remember of the world,
`carried` is what a newcomer takes over, `checkpoints` finds and names folders, `callbacks` follows the steps, and
`trainer` puts it all under a Trainer's methods. Private names of both libraries are in `names`, checked at import.
"""
