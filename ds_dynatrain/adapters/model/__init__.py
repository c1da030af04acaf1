"""Adapters to the user's module: its parallelism (except data) and its state other than parameters.

Begin reading at `shaping`. This package may import only `zero`, `groups` and `versions`.
"""
