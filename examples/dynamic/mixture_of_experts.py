"""A mixture of experts without dropped tokens: each token goes to the experts that together have a share p of its
router's probability.

In this top-p routing (Huang et al., arXiv 2403.07652) a token goes to one expert if its router is certain, and
otherwise to several. The time of a layer therefore depends on what its router has learned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

EXPERTS, TRUST = 4, 0.5
"""Number of experts in each block, and the final value of p. At first all experts compute each token."""


class ExpertBlock(Block):
    """A block with experts. `trust`, the share p of the probability, travels to another stage as extra state."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(EXPERTS)
        )
        self.trust = 1.0

    def get_extra_state(self) -> dict[str, float]:
        """Return the state that moves to another stage together with the block's parameters."""
        return {"trust": self.trust}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Restore the state on the new stage."""
        self.trust = state["trust"]

    def feed(self, x: Tensor) -> Tensor:
        """Compute each token with the experts to which it is routed, and return their weighted sum."""
        tokens = x.flatten(0, 1)
        trust, order = F.softmax(self.router(tokens), dim=1).sort(dim=1, descending=True)
        asked = trust.cumsum(1) - trust < self.trust  # always true for the first expert
        weights = torch.zeros_like(trust).scatter(1, order, trust * asked / (trust * asked).sum(1, keepdim=True))
        fed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = weights[:, number].nonzero()[:, 0]
            fed = fed.index_add(0, rows, expert(tokens[rows]) * weights[rows, number, None])
        return fed.view_as(x)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Lower the share p, in proportion to `progress`. Return a description."""
    for layer in layers.values():
        if isinstance(layer, ExpertBlock):
            layer.trust = 1 - progress * (1 - TRUST)
    return f"experts are asked for {1 - progress * (1 - TRUST):.2f} of the trust"


DYNAMISM = Dynamism(ExpertBlock, change)
