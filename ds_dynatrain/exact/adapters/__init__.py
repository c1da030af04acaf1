"""DeepSpeed's engines, changed to add gradients leaf by leaf (a leaf is a micro-batch of fixed size).

This package may import what `exact` may. Begin reading at `exact_engine`.
"""
