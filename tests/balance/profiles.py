"""Profiles for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_dynatrain.balance.profile import LayerCost, Profile

FP16 = {"weight": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
FP32 = {"weight": 4, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}


def layer(name: str, seconds: float = 1.0, elements: int = 100, kinds: dict[str, int] = FP16, **more: Any) -> LayerCost:
    """A layer whose backward pass takes twice as long as its forward pass."""
    kept = kinds if more.get("trained", True) else {"weight": kinds["weight"]}
    given = {
        "forward_seconds": seconds,
        "backward_seconds": 2 * seconds,
        "kind_bytes": {kind: size * elements for kind, size in kept.items()},
        "activation_bytes": 10 * elements,
        "output_bytes": elements,
    }
    return LayerCost(name=name, **{**given, **more})


def profile(seconds: Sequence[float] = (1.0,) * 8, batch: int = 32, micro: int = 1, **more: Any) -> Profile:
    """Layers of these forward seconds."""
    layers = tuple(layer(f"block.{place}", each) for place, each in enumerate(seconds))
    return Profile(**{"layers": layers, "train_batch_size": batch, "micro_batch_size": micro, **more})
