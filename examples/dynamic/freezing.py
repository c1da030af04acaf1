"""Freezing by a schedule over depth: the first layers stop training, one after the other.

No backward pass runs before the first layer that is still trained, and no gradient is sent to a stage without such a
layer.
"""

from __future__ import annotations

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

SHARE = 0.5
"""Fraction of all layers that is frozen in the end."""


class FrozenBlock(Block):
    """A block that can be frozen. torch's `requires_grad` records this, and travels to another stage with the block."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)


def most(progress: float, count: int) -> int:
    """Return how many of `count` layers are frozen by now."""
    return round(progress * SHARE * count)


def freeze(layers: Layers, until: int) -> str:
    """Freeze all layers before number `until`. Return a description."""
    for layer in (layer for number, layer in layers.items() if number < until):
        layer.requires_grad_(False)
    return f"layers 0 to {until - 1} are frozen" if until else ""


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Freeze the next layers. Return a description."""
    return freeze(layers, most(progress, count))


DYNAMISM = Dynamism(FrozenBlock, change)
