"""Adapters to the user's module: its pipeline, tensor, expert and sequence parallelism, and its state other than
parameters.

Begin reading at `shaping`. This package may import only `zero`, `groups` and `versions`.
"""
