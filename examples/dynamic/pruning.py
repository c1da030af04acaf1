"""Pruning: rows of the feed-forward with the smallest weights are computed no more, whichever block they are in.

The share that is left follows a cubic curve (Zhu and Gupta, arXiv 1710.01878). Deeper blocks lose most, since their
weights begin smaller (depth-scaled initialization, Zhang et al., arXiv 1908.11365).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

PRUNED, LEAST = 0.9, 4
"""The share of rows that goes in the end, and rows that each block keeps."""


class PrunedBlock(Block):
    """`rows` are those that are left: a buffer, shorter from change to change, which goes with it to another stage."""

    rows: Tensor

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("rows", torch.arange(4 * width))
        with torch.no_grad():
            for weight in (self.up.weight, self.down.weight):
                weight.mul_((number + 1) ** -0.5)

    def feed(self, x: Tensor) -> Tensor:
        """With the rows that are left; nothing is computed for others, in neither pass."""
        if len(self.rows) == len(self.up.weight):
            return super().feed(x)
        inner = F.gelu(F.linear(x, self.up.weight[self.rows], self.up.bias[self.rows]))
        return F.linear(inner, self.down.weight[:, self.rows], self.down.bias)

    @torch.no_grad()
    def magnitudes(self) -> list[float]:
        """Of the rows that are left: what is gone stays gone."""
        up, down = self.up.weight[self.rows], self.down.weight[:, self.rows]
        magnitudes: list[float] = (up.norm(dim=1) * down.norm(dim=0)).tolist()
        return magnitudes


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Keep the largest rows of all blocks."""
    blocks = {number: each for number, each in layers.items() if isinstance(each, PrunedBlock)}
    known = gather({number: block.magnitudes() for number, block in blocks.items()})
    every = sorted((each for found in known.values() for each in found), reverse=True)
    whole = sum(len(block.up.weight) for block in list(blocks.values())[:1]) * (count - 2)
    kept = min(len(every), round(whole * (1 - PRUNED * (1 - (1 - progress) ** 3))))
    for number, block in blocks.items():
        found = torch.tensor(known[number])
        stay = max(LEAST, int((found >= every[kept - 1]).sum()))
        block.rows = block.rows[found.topk(min(stay, len(found))).indices.sort().values]
    return f"{kept} of {whole} rows are left"


DYNAMISM = Dynamism(PrunedBlock, change)
