"""Differences between versions of torch and DeepSpeed, and helpers that patch either. Imports no other adapter."""
