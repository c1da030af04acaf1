"""Descriptions of an engine's state: its buffers, where they lie, and its optimizer's scalars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ds_dynatrain.space import BufferId

Buffers = dict[tuple[str, BufferId], torch.Tensor]
"""A map from (state kind, buffer) to the flat local tensor that holds the buffer."""


class Found(NamedTuple):
    """One row of a census: `numel` elements of tensor number `tensor`, from row-major index `start`, at `address`."""

    kind: str
    tensor: int
    start: int
    numel: int
    address: int


@dataclass(frozen=True)
class Scalars:
    """Optimizer scalars, keyed by name and then by tensor number: {"step": {0: 12.0, ...}}.

    Empty before the first step.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def of(self, tensor: int) -> dict[str, float]:
        """Return the scalars of one tensor, keyed by name."""
        return {name: table[tensor] for name, table in self.values.items() if tensor in table}
