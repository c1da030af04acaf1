"""Mixture of Depths: a router selects the tokens that a block computes; all others skip the block.

In Raposo et al. (arXiv 2404.02258) a block computes as many tokens as its capacity allows, and its result is multiplied
by the router's output, so that the router learns. Here the capacity falls with depth, like the fraction of tokens kept
by p-MoD (arXiv 2412.04449). If expensive and cheap blocks alternated instead, stages would already be balanced.
"""

from __future__ import annotations

from torch import Tensor, nn

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

LEAST = 0.125
"""Final capacity of the last block, as a fraction of the tokens."""


class RoutedBlock(Block):
    """A block that computes only the tokens selected by its router. `capacity` travels to another stage as
    extra state.
    """

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.router = nn.Linear(width, 1)
        self.capacity = 1.0

    def get_extra_state(self) -> dict[str, float]:
        """Return the state that moves to another stage together with the block's parameters."""
        return {"capacity": self.capacity}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Restore the state on the new stage."""
        self.capacity = state["capacity"]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the selected tokens, which attend only to each other, and pass the others on unchanged."""
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
    """Lower the capacities, most of all in deep blocks. Return a description."""
    blocks = count - 2
    for number, layer in layers.items():
        if isinstance(layer, RoutedBlock):
            layer.capacity = 1 - progress * (1 - LEAST) * number / blocks
    return f"capacities fall to {1 - progress * (1 - LEAST):.3f}"


DYNAMISM = Dynamism(RoutedBlock, change)
