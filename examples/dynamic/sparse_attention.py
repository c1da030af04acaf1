"""Sparse attention: each block of queries attends only to the blocks of keys that had most of its attention before.

How far a layer looks back grows with its depth here, because of a bias that falls with the distance. In ALiBi (Press et
al., arXiv 2108.12409) each head has its own slope, here each layer. An additional channel of the keys adds the bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dynamic.model import Dynamism, Gather, Layers
from gpt import Block

LENGTH, SIDE, MASS = 512, 32, 0.9
"""Number of positions in a sample and in a block, and the final share of the attention that is kept."""
BLOCKS = LENGTH // SIDE


class SparseBlock(Block):
    """A block with sparse attention.

    kept: for each block of queries, the blocks of keys that are computed; a buffer.
    mass: the share of each block of keys in the attention; a buffer, measured in the next pass if it is empty.
    """

    kept: Tensor
    mass: Tensor

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.slope = 0.25 * 2.0 ** (-7 * number / count)
        self.register_buffer("kept", torch.arange(BLOCKS).expand(BLOCKS, BLOCKS).clone())
        self.register_buffer("mass", torch.zeros(0))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention over the blocks of keys in `kept`. Other blocks are neither read nor computed."""
        bias = self.slope * (query.shape[3] + 1) ** 0.5 * torch.arange(LENGTH).to(key)
        query, value = F.pad(query, (0, 1), value=1.0), F.pad(value, (0, 1))
        key = torch.cat((key, bias[:, None].expand(*key.shape[:3], 1)), 3)
        if not len(self.mass):
            self.mass = measured(query, key)
        if self.kept.shape[1] == BLOCKS:
            return super().mix(query, key, value)[..., :-1]
        blocks = [each.flatten(0, 1).unflatten(1, (BLOCKS, SIDE)) for each in (query, key, value)]
        keys, values = (each[:, self.kept].flatten(2, 3) for each in blocks[1:])
        places = torch.arange(LENGTH, device=key.device).view(BLOCKS, SIDE)
        seen = places[self.kept].flatten(1)[None, :, None] <= places[..., None]
        return F.scaled_dot_product_attention(blocks[0], keys, values, seen).view_as(query)[..., :-1]


@torch.no_grad()
def measured(query: Tensor, key: Tensor) -> Tensor:
    """Return (blocks, blocks): the share of each block of keys in the attention of each block of queries."""
    scores = (query @ key.transpose(2, 3)).mul_(query.shape[3] ** -0.5)
    shares: Tensor = scores.masked_fill_(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf).softmax(3)
    return shares.mean((0, 1)).view(BLOCKS, SIDE, BLOCKS, SIDE).sum(3).mean(1)


def change(layers: Layers, progress: float, gather: Gather, count: int) -> str:
    """Keep the fewest blocks of keys that have the required share of the attention, on average. Return a description.

    Each block of queries also keeps its own block of keys.
    """
    blocks = {number: each for number, each in layers.items() if isinstance(each, SparseBlock)}
    sizes = []
    for number, mass in gather({number: each.mass.tolist() for number, each in blocks.items()}).items():
        own = torch.tensor(mass) + torch.eye(BLOCKS)
        held = own.sort(dim=1, descending=True).values.cumsum(1).mean(0) - 1
        sizes.append(int((held < 1 - progress * (1 - MASS) - 1e-4).sum()) + 1)
        if number in blocks:
            block = blocks[number]
            block.kept, block.mass = own.topk(sizes[-1]).indices.to(block.kept), block.mass.new_zeros(0)
    return f"{min(sizes)} to {max(sizes)} of {BLOCKS} blocks of keys are kept"


DYNAMISM = Dynamism(SparseBlock, change, LENGTH, micro_batch=1)
