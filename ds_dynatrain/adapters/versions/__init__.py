"""Differences between versions of torch and DeepSpeed, and helpers that patch them. Imports no other adapter."""
