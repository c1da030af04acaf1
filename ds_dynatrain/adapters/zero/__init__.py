"""ZeRO: where DeepSpeed's optimizers keep their state, and how this state is detached and restored.

Start with `zero_stage`. Imports `groups` and `versions`.
"""
