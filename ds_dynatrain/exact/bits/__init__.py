"""Sums that are bitwise identical in any layout, records of each step, and the features that were tried in exact jobs.

This package may import what `exact` may. Begin reading at `sums`.
"""
