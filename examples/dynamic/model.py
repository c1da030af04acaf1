"""A GPT as layers of a pipeline whose blocks change during training, and the types that all kinds of change share."""

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
"""The layers that this process holds, by their number in the whole model. All layers are blocks except the first and
last."""
Gather = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""Function that collects a value for each layer from the process that holds it, and returns all values on all
processes."""


@dataclass(frozen=True)
class Dynamism:
    """A kind of change of a model's blocks.

    block: function (number, number of blocks, width, number of heads) that makes a block.
    change: function that changes layers. It is called on all processes at the same step, with the layers that the
        process holds, the progress of the change from 0 to 1, a `Gather`, and the number of all layers. It returns a
        description of the change, the same on all processes, or "" if nothing has changed.
    length: bytes of a sample. Some kinds of change save time only in long samples.
    micro_batch: samples of a micro-batch.
    """

    block: Callable[[int, int, int, int], Block]
    change: Callable[[Layers, float, Gather, int], str]
    length: int = 64
    micro_batch: int = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model."""

    blocks: int = 8
    width: int = 128
    heads: int = 4


class Embed(nn.Module):
    """The embedding: (batch, length) bytes to (batch, length, width)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the byte's embedding and the position's embedding."""
        hidden: Tensor = self.byte(x) + self.place.weight[: x.shape[1]]
        return hidden


class Head(nn.Module):
    """The last layer: (batch, length, width) to logits of the next byte. Further values from the blocks are dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.guess = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return the logits, (batch, length, 256)."""
        logits: Tensor = self.guess(self.norm(given[0] if isinstance(given, tuple) else given))
        return logits


def loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross-entropy of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def pipeline(dynamism: Dynamism, sizes: Sizes) -> PipelineModule:
    """Return the model as a PipelineModule with one stage, with the same weights on all processes."""
    torch.manual_seed(0)
    block = dynamism.block
    layers = [
        LayerSpec(Embed, dynamism.length, sizes.width),
        *(LayerSpec(block, number, sizes.blocks, sizes.width, sizes.heads) for number in range(sizes.blocks)),
        LayerSpec(Head, sizes.width),
    ]
    return PipelineModule(layers, num_stages=1, loss_fn=loss, partition_method="uniform")
