"""A language model whose attention goes over sequence ranks, and a loop that gives each its part of the sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from tests.engine.axis_walks import Subject
from tests.engine.models import Sequences

WORDS = 19
LENGTH = 12
"""Divided by 1, 2, 3 and 4 sequence ranks."""
WIDTH, HEADS = 24, 6
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}
"""An optimizer that shows a gradient of the wrong size, which Adam does not."""
CLIPPED = {**SGD, "gradient_clipping": 0.2}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Causal attention over (batch, length, heads, size), with what is whole there."""
    turned = [part.transpose(1, 2) for part in (query, key, value)]
    mixed = F.scaled_dot_product_attention(turned[0], turned[1], turned[2], is_causal=True)
    return mixed.transpose(1, 2)


class Block(nn.Module):
    """Attention over the whole sequence and an MLP over a part of it."""

    def __init__(self, group: Any, hidden: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH)
        spread = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)
        if hidden:
            self.__dict__["spread"] = spread  # held, and no submodule
        else:
            self.spread = spread

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(2, (HEADS, -1)) for part in self.qkv(self.norm(hidden)).chunk(3, 2))
        hidden = hidden + self.out(self.spread(*parts, 0).flatten(2))
        return hidden + self.down(F.gelu(self.up(hidden)))


class LongGPT(nn.Module):
    """Two blocks; one holds its DistributedAttention outside of its submodules. Tied embedding."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.2)
        self.blocks = nn.ModuleList([Block(group, hidden=False), Block(group, hidden=True)])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of this rank's part, of shape (batch, part of LENGTH)."""
        hidden = self.words(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(F.linear(hidden, self.words.weight).flatten(0, 1).float(), targets.flatten())


def long_gpt(group: Any = None) -> LongGPT:
    """The model, with the same weights on every rank; the caller's random stream is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LongGPT(group)


class Texts(Sequences):
    """Sequences that 1, 2, 3 and 4 ranks can share."""

    def __init__(self, length: int = 96) -> None:
        super().__init__(length, LENGTH, WORDS)


def own_part(engine: Any, batch: Any) -> list[torch.Tensor]:
    """This rank's part of the sequences of a batch."""
    return [whole.chunk(engine.sequence, 1)[engine.sequence_rank] for whole in batch]


def one_step(engine: Any, batch: Any) -> float:
    """DeepSpeed adds up what sequence ranks find: each gives its share of the mean."""
    loss = engine(*own_part(engine, batch))
    engine.backward(loss / engine.sequence)
    engine.step()
    return float(loss.item())


def sgd() -> Subject:
    """The model, whose losses tell the size of its gradients."""
    return Subject(long_gpt, Texts, step=one_step, settings=CLIPPED)


def adam() -> Subject:
    """The model with the usual moments."""
    return Subject(long_gpt, Texts, step=one_step)
