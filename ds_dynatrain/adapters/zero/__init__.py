"""ZeRO: where DeepSpeed's optimizers keep their state, and how it is taken off and put back; start with `zero_stage`.

Imports `groups` and `versions`.
"""
