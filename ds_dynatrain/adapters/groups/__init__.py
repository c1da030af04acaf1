"""Devices, communicators and process groups.

Begin reading at `world` and `worlds`. This package may import only `versions`.
"""
