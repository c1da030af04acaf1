"""Freezing by a schedule over depth: the first layers are trained no more, one after the other.

Nothing is computed backward before the first layer that is trained, and no gradient is sent to a stage that has none.
"""

from __future__ import annotations

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

SHARE = 0.5
"""Of all layers."""


class FrozenBlock(Block):
    """What is frozen about it says torch itself: `requires_grad` goes with it to another stage."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)


def most(progress: float, count: int) -> int:
    """So many layers are frozen by now, of so many in all."""
    return round(progress * SHARE * count)


def freeze(layers: Layers, until: int) -> str:
    """Train those before `until` no more."""
    for layer in (layer for number, layer in layers.items() if number < until):
        layer.requires_grad_(False)
    return f"layers 0 to {until - 1} are frozen" if until else ""


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """The next ones."""
    return freeze(layers, most(progress, count))


DYNAMISM = Dynamism(FrozenBlock, change)
