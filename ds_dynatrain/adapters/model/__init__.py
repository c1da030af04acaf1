"""The user's module: its pipeline, tensor, expert and sequence parallelism, and its state other than parameters.

Start with `shaping`. Imports `zero`, `groups` and `versions`.
"""
