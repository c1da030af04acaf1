"""Differences between versions of torch and DeepSpeed, and small means to patch either; imports no other adapter."""
