"""Freezing by gradients: the first layers stop training once the norms of their gradients hardly change.

AutoFreeze (Liu et al., arXiv 2102.01386) decides by percentiles of how much gradient norms change. Here the first
layers freeze whose norms change at most as much as the median layer's. Never are more layers frozen than by `freezing`
at the same time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dynamic.freezing import freeze, most
from dynamic.model import Dynamism, Gather, Layers
from gpt import Block


class WatchedBlock(Block):
    """A block that adds up the norms of its gradients.

    norms: the current sum and the previous one. It is a buffer, so it travels to another stage with the block.
    """

    norms: Tensor

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("norms", torch.zeros(2))

    def feed(self, x: Tensor) -> Tensor:
        """Return the result of `Block.feed`. A hook on a view of the weight sees the gradient of each micro-batch."""
        weight = self.up.weight.view_as(self.up.weight)
        if weight.requires_grad:
            weight.register_hook(self.see)
        return F.linear(F.gelu(F.linear(x, weight, self.up.bias)), self.down.weight, self.down.bias)

    def see(self, gradient: Tensor) -> None:
        """Add the norm of a gradient to the sum."""
        self.norms[0] += gradient.norm()

    def look(self) -> float:
        """Return by which fraction the sum has changed since the last call, and start a new sum."""
        now, before = map(float, self.norms)
        self.norms = self.norms.new_tensor([0.0, now])
        return abs(now - before) / max(before, 1e-12)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Freeze the first blocks whose gradients hardly change any more, and the embedding. Return a description."""
    blocks = {number: each for number, each in layers.items() if isinstance(each, WatchedBlock)}
    changes = gather({number: each.look() for number, each in blocks.items() if each.up.weight.requires_grad})
    middle, first = sorted(changes.values())[len(changes) // 2], min(changes)
    until = first
    while until < most(progress, count) and changes[until] <= middle:
        until += 1
    return freeze(layers, until) if until > first else ""


DYNAMISM = Dynamism(WatchedBlock, change)
