"""DeepSpeed's engine: starting it, and detaching and attaching its parts in a live switch. Start with `host`.

Imports all other adapters.
"""
