"""Sums that have the same bits in any world, records of each step, and the features that were tried in exact jobs.

May import what `exact` may; start with `sums`.
"""
