"""Clocks of a live job: the seconds of each layer and stage during DeepSpeed's passes.

May import what `balance` may; start with `timing`.
"""
