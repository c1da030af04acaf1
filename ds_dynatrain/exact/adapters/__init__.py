"""DeepSpeed's engines, adding gradients leaf by leaf (a leaf is a micro-batch of fixed size).

May import what `exact` may; start with `exact_engine`.
"""
