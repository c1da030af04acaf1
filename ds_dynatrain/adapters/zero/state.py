"""Descriptions of an engine's state: its buffers, where they lie, and the scalars of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ds_dynatrain.space import BufferId

Buffers = dict[tuple[str, BufferId], torch.Tensor]
"""(state kind, buffer) -> the flat local tensor that holds it."""


class Found(NamedTuple):
    """One row of a census: `numel` elements of tensor number `tensor`, from row-major index `start`, at `address`."""

    kind: str
    tensor: int
    start: int
    numel: int
    address: int


@dataclass(frozen=True)
class Scalars:
    """Optimizer scalars per tensor number, such as {"step": {0: 12.0, ...}}; empty before the first step."""

    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def of(self, tensor: int) -> dict[str, float]:
        """Return the scalars of one tensor, by name."""
        return {name: table[tensor] for name, table in self.values.items() if tensor in table}
