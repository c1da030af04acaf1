"""ZeRO: where DeepSpeed's optimizers keep their state, and how the state is detached and restored.

Start with `zero_stage`. Imports `groups` and `versions`.
"""
