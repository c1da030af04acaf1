"""Output tensors: the tensors that are sent or saved, and the elements of logical tensors of which they consist."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

BEFORE, AFTER = "before all layers", "after all layers"
Names = str | Mapping[str, str] | Callable[[str], str]
"""How outputs are named: "hf", "adapters", "module", or a name for each parameter as a mapping or a function."""


Sized = TypeVar("Sized")


def batches(items: Iterable[Sized], nbytes: Callable[[Sized], int], most: int) -> Iterator[list[Sized]]:
    """Yield lists of consecutive items with at most `most` bytes each. A larger item is yielded alone in a list."""
    batch, filled = list[Sized](), 0
    for item in items:
        if batch and filled + nbytes(item) > most:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += nbytes(item)
    if batch:
        yield batch


@dataclass(frozen=True)
class ParamMeta:
    """The description of an output tensor: its name, element type and full shape, and how `iter_local` shards it.

    owners: the ranks that take part in `iter_full`.
    mesh_shape: the shape of a device mesh over these ranks; None if `iter_local` cannot yield the tensor.
    placements: torch's `Replicate()` or `Shard(dim)` for each axis of the mesh; None if `iter_local` cannot yield the
        tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorRun:
    """The elements [start, stop) of logical tensor number `tensor`; the first is element `at` of an output tensor."""

    tensor: int
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True)
class Delta:
    """A low-rank term that is added to an output tensor: scaling x up x down, transposed if `is_transposed`."""

    down: Output
    up: Output
    scaling: float
    is_transposed: bool


@dataclass(frozen=True)
class Output:
    """An output tensor.

    layer: the name of the layer to which it belongs. The outputs of a layer are consecutive.
    runs: the elements of which it consists.
    deltas: low-rank terms to add to these elements.
    """

    name: str
    shape: tuple[int, ...]
    runs: tuple[TensorRun, ...]
    layer: str
    deltas: tuple[Delta, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_outside(self) -> bool:
        """Whether the output belongs to no layer."""
        return self.layer in (BEFORE, AFTER)

    @property
    def tensors(self) -> Iterator[int]:
        """The numbers of the logical tensors from which the output is made."""
        for run in self.runs:
            yield run.tensor
        for delta in self.deltas:
            yield from delta.down.tensors
            yield from delta.up.tensors

    def runs_of(self, start: int, stop: int, at: int = 0) -> Iterator[TensorRun]:
        """Yield runs with the output's elements [start, stop), placed at element `at` of another output."""
        for run in self.runs:
            low, high = max(start, run.at), min(stop, run.at + run.stop - run.start)
            if low < high:
                first = run.start + low - run.at
                yield TensorRun(run.tensor, first, first + high - low, at + low - start)
