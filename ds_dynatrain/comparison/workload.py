"""What is trained: a GPT over bytes, and text for it, the same in every rank and every way."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_dynatrain.comparison.job import BATCH, LENGTH, SHAPES

TEXT_BYTES = 400_000
LEARNING_RATE = 5e-4


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        query, key, value = self.qkv(self.norm_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.norm_feed(x))))
        return x + fed


class GPT(nn.Module):
    """Returns the loss of guessing each next byte of a (batch, LENGTH + 1) tensor."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = self.byte(tokens[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Pieces of the source code of Python's standard library, each with its number."""

    def __init__(self, count: int) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += file.read_bytes()
            if len(text) >= TEXT_BYTES:
                break
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._count, self._stride = count, (len(text) - LENGTH - 1) // count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """((LENGTH + 1,) bytes, the number)."""
        begin = index * self._stride
        return self._text[begin : begin + LENGTH + 1].long(), index


def model_of(size: str) -> GPT:
    """The model of a name in `SHAPES`, with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(*SHAPES[size])


def share(samples: Samples, step: int, rank: int, ranks: int) -> tuple[Tensor, list[int]]:
    """A rank's part of the global batch of a step (from 0), and which samples these are."""
    each = BATCH // ranks
    begin = step * BATCH + rank * each
    numbers = list(range(begin, begin + each))
    return torch.stack([samples[number][0] for number in numbers]), numbers


def config(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration: bf16, and AdamW of torch, since DeepSpeed's own wants a compiler."""
    return {
        "train_batch_size": BATCH,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
    }
