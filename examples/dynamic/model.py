"""A GPT as layers of a pipeline, whose blocks change while it trains, and what the dynamisms have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn import functional as F

from gpt import Block

Layers = Mapping[int, nn.Module]
"""The layers that this process holds, by their number in the whole model; blocks are all but the first and the last."""
Gather = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""Gives what is said of each layer, by whoever holds it, to all processes."""


@dataclass(frozen=True)
class Dynamism:
    """How blocks change.

    block: makes the one of a number, of so many, of a width and a number of heads. change: is called on all processes
    at the same step, with the layers that the process holds, how far the change has come, from 0 to 1, and the number
    of all layers. It changes them, and returns what happened in words, the same on all, or "" for nothing. length,
    micro_batch: bytes of a sample, and samples; what some save shows in long ones alone.
    """

    block: Callable[[int, int, int, int], Block]
    change: Callable[[Layers, float, Gather, int], str]
    length: int = 64
    micro_batch: int = 4


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    blocks: int = 8
    width: int = 128
    heads: int = 4


class Embed(nn.Module):
    """Bytes (batch, length) to (batch, length, width)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what the byte is and where it stands."""
        hidden: Tensor = self.byte(x) + self.place.weight[: x.shape[1]]
        return hidden


class Head(nn.Module):
    """(batch, length, width) to logits of the next byte; what blocks hand on beside that ends here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.guess = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Logits (batch, length, 256)."""
        logits: Tensor = self.guess(self.norm(given[0] if isinstance(given, tuple) else given))
        return logits


def loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """The mean over a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def pipeline(dynamism: Dynamism, sizes: Sizes) -> PipelineModule:
    """The model in one stage, with the same weights on all processes."""
    torch.manual_seed(0)
    block = dynamism.block
    layers = [
        LayerSpec(Embed, dynamism.length, sizes.width),
        *(LayerSpec(block, number, sizes.blocks, sizes.width, sizes.heads) for number in range(sizes.blocks)),
        LayerSpec(Head, sizes.width),
    ]
    return PipelineModule(layers, num_stages=1, loss_fn=loss, partition_method="uniform")
