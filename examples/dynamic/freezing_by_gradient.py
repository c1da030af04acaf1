"""Freezing by gradients: the first layers are trained no more once their gradients have come to rest.

AutoFreeze (Liu et al., arXiv 2102.01386) goes by percentiles of how gradient norms change. Here those in front freeze
whose norms change no more than that of the middle one, and no more of them than `freezing` has frozen by then.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dynamic.freezing import freeze, most
from dynamic.model import Dynamism, Gather, Layers
from gpt import Block


class WatchedBlock(Block):
    """Adds up the norms of its gradients. `norms`, the present sum and the one before, is a buffer: it goes along."""

    norms: Tensor

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("norms", torch.zeros(2))

    def feed(self, x: Tensor) -> Tensor:
        """As it was; the gradient of a view is that of a micro-batch."""
        weight = self.up.weight.view_as(self.up.weight)
        if weight.requires_grad:
            weight.register_hook(self.see)
        return F.linear(F.gelu(F.linear(x, weight, self.up.bias)), self.down.weight, self.down.bias)

    def see(self, gradient: Tensor) -> None:
        """Add its norm."""
        self.norms[0] += gradient.norm()

    def look(self) -> float:
        """By what share the sum has changed since the last look."""
        now, before = map(float, self.norms)
        self.norms = self.norms.new_tensor([0.0, now])
        return abs(now - before) / max(before, 1e-12)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Freeze those that have come to rest, from the first block that is trained on; with it the embedding."""
    blocks = {number: each for number, each in layers.items() if isinstance(each, WatchedBlock)}
    changes = gather({number: each.look() for number, each in blocks.items() if each.up.weight.requires_grad})
    middle, first = sorted(changes.values())[len(changes) // 2], min(changes)
    until = first
    while until < most(progress, count) and changes[until] <= middle:
        until += 1
    return freeze(layers, until) if until > first else ""


DYNAMISM = Dynamism(WatchedBlock, change)
