"""Early exit: after each block, the tokens that the block has changed least skip all later blocks.

CALM (Schuster et al., arXiv 2207.07061) describes criteria for when a token may exit; one of them is that its state
hardly changes any more. There tokens exit during generation, here during training, so that deeper blocks have less to
compute.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

LEAVING = 0.18
"""Final fraction of the remaining tokens that exit after each block."""


class ExitBlock(Block):
    """A block after which some tokens exit. The number `leaving` travels to another stage as extra state."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.leaving = 0.0

    def get_extra_state(self) -> dict[str, float]:
        """Return the state that moves to another stage together with the block's parameters."""
        return {"leaving": self.leaving}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Restore the state on the new stage."""
        self.leaving = state["leaving"]

    def forward(self, given: Any) -> Any:
        """Return (hidden states, mask): (batch, length, width), and (batch, length) with 1 for tokens that are left.

        given: the same pair from the previous block, or only the hidden states for the first block.
        """
        if not isinstance(given, tuple):
            given = given, torch.ones(given.shape[:2], dtype=torch.int64, device=given.device)
        hidden, left = given
        batch, length, width = hidden.shape
        places = left.nonzero()[:, 1].view(batch, -1)  # the same number in each sample
        index = places[..., None].expand(-1, -1, width)
        before = hidden if places.shape[1] == length else hidden.gather(1, index)
        made = super().forward(before)
        result = made if places.shape[1] == length else hidden.scatter(1, index, made)
        if not self.leaving:
            return result, left
        moved = ((made - before).norm(dim=2) / before.norm(dim=2)).detach()
        stay = moved.topk(max(1, round(places.shape[1] * (1 - self.leaving)))).indices
        return result, torch.zeros_like(left).scatter(1, places.gather(1, stay), 1)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Let more tokens exit, in proportion to `progress`. Return a description."""
    for layer in layers.values():
        if isinstance(layer, ExitBlock):
            layer.leaving = LEAVING * progress
    return f"{LEAVING * progress:.3f} of the tokens leave at each block"


DYNAMISM = Dynamism(ExitBlock, change)
