"""Clocks of a live job: the seconds of each layer and stage during DeepSpeed's passes.

This package may import what `balance` may. Begin reading at `timing`.
"""
