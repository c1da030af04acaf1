"""Devices, communicators and process groups. Start with `world` and `worlds`. Imports only `versions`."""
