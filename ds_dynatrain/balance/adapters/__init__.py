"""Clocks of a live job: the seconds of each layer and stage, as DeepSpeed runs them.

May import what `balance` may; start with `timing`.
"""
