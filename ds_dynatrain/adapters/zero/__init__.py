"""Adapters to ZeRO: where DeepSpeed's optimizers keep their state, and how this state is detached and restored.

Begin reading at `zero_stage`. This package may import only `groups` and `versions`.
"""
