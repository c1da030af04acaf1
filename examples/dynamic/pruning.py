"""Pruning: the rows of the feed-forward layers with the smallest weights, over all blocks, are no longer computed.

The fraction of rows that is left follows a cubic curve (Zhu and Gupta, arXiv 1710.01878). Deeper blocks lose the most
rows, because their weights start smaller (depth-scaled initialization, Zhang et al., arXiv 1908.11365).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

PRUNED, LEAST = 0.9, 4
"""Final fraction of rows that are pruned, and the number of rows that each block keeps at least."""


class PrunedBlock(Block):
    """A block that computes only some rows of its feed-forward layer.

    rows: the rows that are left. It is a buffer, which shrinks with each change and travels to another stage.
    """

    rows: Tensor

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("rows", torch.arange(4 * width))
        with torch.no_grad():
            for weight in (self.up.weight, self.down.weight):
                weight.mul_((number + 1) ** -0.5)

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward layer's result from the rows that are left. Other rows are computed in
        neither pass.
        """
        if len(self.rows) == len(self.up.weight):
            return super().feed(x)
        inner = F.gelu(F.linear(x, self.up.weight[self.rows], self.up.bias[self.rows]))
        return F.linear(inner, self.down.weight[:, self.rows], self.down.bias)

    @torch.no_grad()
    def magnitudes(self) -> list[float]:
        """Return the magnitude of each row that is left. Pruned rows never come back."""
        up, down = self.up.weight[self.rows], self.down.weight[:, self.rows]
        magnitudes: list[float] = (up.norm(dim=1) * down.norm(dim=0)).tolist()
        return magnitudes


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Keep only the largest rows over all blocks. Return a description."""
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
