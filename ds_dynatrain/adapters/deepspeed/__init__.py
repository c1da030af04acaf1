"""DeepSpeed's engine: its start, and what a live switch takes off it and puts on it again; start with `host`.

Imports all other adapters.
"""
