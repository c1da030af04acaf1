"""Boxes: axis-aligned half-open blocks of a tensor, in any number of dims (none for a scalar)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import interval
from ds_dynatrain.space.tensor import Ints


@dataclass(frozen=True, order=True)
class Box:
    """The elements whose index lies in [start[d], stop[d]) in every dim d. A box of no dims is one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise LayoutError for ends of different length, below 0, or in the wrong order."""
        if len(self.start) != len(self.stop):
            raise LayoutError(
                f"a box has {len(self.start)} starts and {len(self.stop)} stops; give one of each for every dim"
            )
        if any(not 0 <= low <= high for low, high in zip(self.start, self.stop, strict=True)):
            raise LayoutError(f"box {self.start} to {self.stop}; give 0 <= start <= stop in every dim")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dim."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The elements in both, or None if there are none; LayoutError for different numbers of dims."""
        if len(self.start) != len(other.start):
            raise LayoutError(
                f"a box of {len(self.start)} dims meets one of {len(other.start)}; give boxes of one tensor"
            )
        low = tuple(map(max, self.start, other.start))
        high = tuple(map(min, self.stop, other.stop))
        return Box(low, high) if all(map(int.__lt__, low, high)) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of the other is in this one."""
        return other.numel == 0 or self.intersect(other) == other

    def shift(self, by: tuple[int, ...]) -> Box:
        """The same block, moved."""
        low = tuple(a + b for a, b in zip(self.start, by, strict=True))
        return Box(low, tuple(a + b for a, b in zip(low, self.shape, strict=True)))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def runs_of_box(shape: tuple[int, ...], box: Box) -> tuple[Ints, Ints]:
    """The fewest row-major runs (starts, stops) of a box of a tensor; LayoutError if it is not in the tensor."""
    if not Box.whole(shape).contains(box):
        raise LayoutError(f"box {box.start} to {box.stop} is not in a tensor of shape {shape}; give a box inside of it")
    if not box.numel:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    strides = row_major(shape)
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = range(max(inner - 1, 0))
    length = math.prod(box.shape[len(outer) :])
    base = sum(low * stride for low, stride in zip(box.start, strides, strict=True))
    steps = [np.arange(box.shape[dim], dtype=np.int64) * strides[dim] for dim in outer]
    start = np.array([base + sum(step) for step in itertools.product(*steps)], dtype=np.int64)
    return interval.union(start, start + length)
