"""Devices, communicators and process groups: start with `world` and `worlds`; imports `versions` alone."""
