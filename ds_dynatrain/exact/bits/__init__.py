"""Arithmetic whose results have the same bits in any world, records of each step in bits, and the rows of tried
features.

May import what `exact` may; start with `sums`.
"""
