"""A mixture of experts that drops no token: each asks as many experts as have a share p of its router's trust.

Huang et al., arXiv 2403.07652 (top-p): a router that is sure asks one, others ask several, so the time of a layer goes
with what its router has learned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

EXPERTS, TRUST = 4, 0.5
"""Of each block, and p in the end; all are asked at first."""


class ExpertBlock(Block):
    """`trust` is a plain number, which goes to another stage as extra state."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(EXPERTS)
        )
        self.trust = 1.0

    def get_extra_state(self) -> dict[str, float]:
        """What goes along."""
        return {"trust": self.trust}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """On the new stage."""
        self.trust = state["trust"]

    def feed(self, x: Tensor) -> Tensor:
        """Each expert computes the tokens that have asked it, and nothing else."""
        tokens = x.flatten(0, 1)
        trust, order = F.softmax(self.router(tokens), dim=1).sort(dim=1, descending=True)
        asked = trust.cumsum(1) - trust < self.trust  # the first one always is
        weights = torch.zeros_like(trust).scatter(1, order, trust * asked / (trust * asked).sum(1, keepdim=True))
        fed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = weights[:, number].nonzero()[:, 0]
            fed = fed.index_add(0, rows, expert(tokens[rows]) * weights[rows, number, None])
        return fed.view_as(x)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Less and less of the trust is asked for."""
    for layer in layers.values():
        if isinstance(layer, ExpertBlock):
            layer.trust = 1 - progress * (1 - TRUST)
    return f"experts are asked for {1 - progress * (1 - TRUST):.2f} of the trust"


DYNAMISM = Dynamism(ExpertBlock, change)
