"""Mixture of Depths: a router lets the best tokens through a block, and the others pass it by.

Raposo et al., arXiv 2404.02258: so many tokens as the block's capacity says, and what the block adds is weighed with
the router's word, so that the router learns. Here the capacity falls with depth, as the share of tokens that p-MoD
(arXiv 2412.04449) keeps: where dear and cheap blocks alternate nothing is left to balance.
"""

from __future__ import annotations

from torch import Tensor, nn

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

LEAST = 0.125
"""Capacity of the last block in the end, as a share of the tokens."""


class RoutedBlock(Block):
    """`capacity` is a plain number, which goes to another stage as extra state."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.router = nn.Linear(width, 1)
        self.capacity = 1.0

    def get_extra_state(self) -> dict[str, float]:
        """What goes along."""
        return {"capacity": self.capacity}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """On the new stage."""
        self.capacity = state["capacity"]

    def forward(self, x: Tensor) -> Tensor:
        """The tokens that are let through attend to each other alone."""
        scores: Tensor = self.router(x)
        if self.capacity >= 1:
            return x + scores.sigmoid() * (super().forward(x) - x)
        count = max(1, round(self.capacity * x.shape[1]))
        places = scores.topk(count, dim=1).indices.sort(dim=1).values
        index = places.expand(-1, -1, x.shape[2])
        chosen = x.gather(1, index)
        added = scores.gather(1, places).sigmoid() * (super().forward(chosen) - chosen)
        return x.scatter_add(1, index, added)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Capacities fall, those of deep blocks most."""
    blocks = count - 2
    for number, layer in layers.items():
        if isinstance(layer, RoutedBlock):
            layer.capacity = 1 - progress * (1 - LEAST) * number / blocks
    return f"capacities fall to {1 - progress * (1 - LEAST):.3f}"


DYNAMISM = Dynamism(RoutedBlock, change)
