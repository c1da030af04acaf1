"""DeepSpeed's engines, adding gradients leaf by leaf.

May import what `exact` may; start with `exact_engine`.
"""
