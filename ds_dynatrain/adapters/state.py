"""What an adapter tells of an engine's state, and the four verbs that each kind of DeepSpeed optimizer answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ds_dynatrain.adapters.model import ModelMap
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
        """Name -> value for one tensor."""
        return {name: table[tensor] for name, table in self.values.items() if tensor in table}


class StageAdapter(Protocol):
    """One kind of DeepSpeed optimizer: where its state lies, and how it is taken off and put on a module."""

    def describe(self, engine: Any, model: ModelMap) -> tuple[Buffers, Scalars]:
        """The live flat buffers and scalars on this rank."""

    def census(self, engine: Any, model: ModelMap) -> list[Found]:
        """Where each parameter's elements really lie, read from DeepSpeed's own bookkeeping; moments left out."""

    def release(self, engine: Any, model: ModelMap) -> None:
        """Take attributes off the module, after the optimizer's own `destroy`; the buffers themselves are untouched."""

    def refill(self, engine: Any, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
        """Put real buffers into an optimizer that was built without memory."""
