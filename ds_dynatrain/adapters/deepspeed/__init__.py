"""DeepSpeed's engine: how it is started, and what a live switch detaches from it and attaches again. Start with `host`.

Imports all other adapters.
"""
