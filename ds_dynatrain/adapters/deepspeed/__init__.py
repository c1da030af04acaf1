"""Adapters to DeepSpeed's engine: they start it, and detach and reattach its parts in a live switch.

Begin reading at `host`. This package may import all other adapters.
"""
