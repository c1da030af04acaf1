"""Runs of a row-major tensor as boxes, and boxes as runs.

A run [a, b) of the flattened elements is at most 2 * ndim - 1 boxes: it climbs from its first element to whole rows,
on to whole planes, and down again to its last element.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import interval
from ds_dynatrain.space.box import Box, row_major
from ds_dynatrain.space.tensor import Ints


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes of the row-major run [start, stop), in row-major order; LayoutError if it is not in the tensor."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise LayoutError(f"run [{start}, {stop}) is not in a tensor of shape {shape} = {math.prod(shape)} elements")
    if start == stop:
        return ()
    return tuple(_boxes(shape, start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [_in_row(first, box) for box in _boxes(shape[1:], head, tail)]
    boxes = []
    if head:
        boxes += [_in_row(first, box) for box in _boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last, *shape[1:])))
    if tail:
        boxes += [_in_row(last, box) for box in _boxes(shape[1:], 0, tail)]
    return boxes


def _in_row(index: int, box: Box) -> Box:
    return Box((index, *box.start), (index + 1, *box.stop))


def runs_of_box(shape: tuple[int, ...], box: Box) -> tuple[Ints, Ints]:
    """The fewest row-major runs (starts, stops) of a box of a tensor; LayoutError if it is not in the tensor."""
    if not Box.whole(shape).contains(box):
        raise LayoutError(f"box {box.start} to {box.stop} is not in a tensor of shape {shape}")
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
