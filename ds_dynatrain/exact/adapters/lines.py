"""The positions of gradients in ZeRO stages 1 to 3, from which an exact job plans its gradient sums.

A *line* is an array of gradients that are reduced together: those of an optimizer group in stages 1 and 2, and those of
all parameters in stage 3. Each rank owns an equal part of a line. A *chunk* is sent in one message. Each rank owns a
part of the chunk, which is contiguous in the rank's part of the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_dynatrain.adapters.versions.deepspeed_versions import flat_offsets

LEAST_CHUNK = 1 << 20
"""Smallest number of elements in a chunk, so that the time of a message exceeds its latency."""
Run = tuple[int, int]
"""A range of elements in a line (gradients that are reduced together): its first element, and the one after its last.
"""
Span = tuple[nn.Parameter, int, int]
"""A parameter, and the start and stop of its gradient in a line (gradients that are reduced together)."""


@dataclass(frozen=True)
class GradientPiece:
    """A range of a parameter's gradient within a chunk.

    start: the first element in the gradient.
    at: the position of that element in the chunk.
    numel: the number of elements.
    """

    parameter: nn.Parameter
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """Gradients that are sent in one message, sorted by owner. Gaps between the pieces are zeros.

    line: the number of the line (the gradients that are reduced together).
    pieces: the ranges of gradients in the chunk.
    splits: the number of elements that each rank owns.
    begin: the offset of this rank's part of the chunk in its part of the line.
    freed: the parameters without a later chunk, whose gradients are dropped after this one.
    """

    line: int
    pieces: tuple[GradientPiece, ...]
    splits: tuple[int, ...]
    begin: int
    freed: tuple[nn.Parameter, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements in the chunk, over all ranks."""
        return sum(self.splits)


class Lines:
    """The gradients of one ZeRO optimizer, as lines. Base class of `FlatLines` and `CutLines`.

    A line is an array of gradients that are reduced together.

    is_eager: whether chunks are sent while a backward pass is still running.
    chunks: the messages in the order of sending, which begins with the layers that a backward pass reaches first.
    lengths: the number of elements that this rank owns of each line, including padding.
    numel: the number of elements of the whole model that have a gradient.
    """

    is_eager = True
    chunks: list[Chunk]
    lengths: list[int]
    numel: int

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def sharing(self) -> list[Any]:
        """Process groups over which the tensors in `held` together contain the whole gradient, each element once."""
        return [self._zero.dp_process_group]

    def group(self, line: int) -> Any:
        """Return the process group whose ranks own the parts of a line (the gradients that are reduced together)."""
        return self._zero.dp_process_group

    def take(self, line: int, total: torch.Tensor) -> None:
        """Give DeepSpeed the gradients of a line for its next step.

        line: the number of the line (gradients that are reduced together).
        total: this rank's part of the line, summed over the whole global batch.
        """
        raise NotImplementedError

    def held(self) -> list[torch.Tensor]:
        """Return the gradient sums that DeepSpeed currently holds, in fp32; padding is 0."""
        raise NotImplementedError


def lines_of(zero: Any, order: Mapping[int, int]) -> Lines:
    """Return the `Lines` (positions of gradients) of a ZeRO optimizer of stages 1 to 3.

    order: a map from each parameter's id to its number in the module.
    """
    return (CutLines if isinstance(zero, DeepSpeedZeroOptimizer_Stage3) else FlatLines)(zero, order)


class FlatLines(Lines):
    """The gradients in ZeRO stages 1 and 2, with one line (gradients reduced together) for each optimizer group.

    The parameters of a group lie end to end. The line is cut into equal parts, which may begin within a parameter.

    further: parameters with a line of their own each, after those of the groups.
    """

    def __init__(self, zero: Any, order: Mapping[int, int], further: Sequence[nn.Parameter] = ()) -> None:
        super().__init__(zero)
        self.is_eager = bool(zero.partition_gradients)
        own, ranks = [int(size) for size in zero.partition_size], dist.get_world_size(group=zero.dp_process_group)
        self.lengths = [*own, *(-(-held.numel() // ranks) for held in further)]
        self.spans: list[list[Span]] = []
        for line in range(len(own)):
            placed = zip(zero.round_robin_bit16_groups[line], flat_offsets(zero, line), strict=True)
            self.spans.append([(held, at, at + held.numel()) for held, at in placed])
        self.spans += [[(held, 0, held.numel())] for held in further]
        self.numel = sum(stop - start for spans in self.spans for _, start, stop in spans)
        self.chunks = in_order([chunk for line in range(len(self.lengths)) for chunk in self._chunks_of(line)], order)

    def group(self, line: int) -> Any:
        """Return the process group of the line's optimizer group."""
        groups = self._zero.real_dp_process_group
        return groups[line] if line < len(groups) else self._zero.dp_process_group

    def take(self, line: int, total: torch.Tensor) -> None:
        """Set the summed gradients `total` as the averaged gradient of the optimizer group `line`."""
        self._zero.averaged_gradients[line] = [total]

    def held(self) -> list[torch.Tensor]:
        """Return the averaged gradients that DeepSpeed currently holds for all optimizer groups."""
        return [part for parts in self._zero.averaged_gradients.values() for part in parts]

    def _chunks_of(self, line: int) -> Iterator[Chunk]:
        size, spans = self.lengths[line], self.spans[line]
        ranks, rank = dist.get_world_size(group=self.group(line)), dist.get_rank(group=self.group(line))
        end = max(stop for _, _, stop in spans)
        for runs in cut(end, size, ranks, int(self._zero.reduce_bucket_size), self.is_eager):
            owned = [[overlap(run, (each * size, (each + 1) * size)) for run in runs] for each in range(ranks)]
            splits = tuple(sum(stop - start for start, stop in parts) for parts in owned)
            begin = min((start for start, stop in owned[rank] if start < stop), default=rank * size) - rank * size
            yield Chunk(line, tuple(_pieces(spans, runs)), splits, begin)


class CutLines(Lines):
    """The gradients in ZeRO stage 3, in a single line (gradients reduced together).

    Each parameter is cut into equal parts, the last of which is padded. A rank's parts lie end to end.
    """

    def __init__(self, zero: Any, order: Mapping[int, int]) -> None:
        super().__init__(zero)
        self.lengths = [zero.grad_partitions_flat_buffer.numel()]
        self.numel = sum(int(held.ds_numel) for parameters in zero.fp16_groups for held in parameters)
        self.chunks = in_order(list(self._all_chunks()), order)

    def take(self, line: int, total: torch.Tensor) -> None:
        """Copy the summed gradients into DeepSpeed's flat buffer, and set slices of it as the parameters' averaged
        gradients.

        The buffer counts as state here, because it keeps each parameter's latest gradient.
        """
        zero, position = self._zero, 0
        zero.grad_partitions_flat_buffer.copy_(total)
        for number, parameters in enumerate(zero.fp16_groups):
            parts = []
            for parameter in parameters:
                parts.append(zero.grad_partitions_flat_buffer.narrow(0, position, parameter.partition_numel()))
                position += parameter.partition_numel()
            zero.averaged_gradients[number] = parts

    def held(self) -> list[torch.Tensor]:
        """Return the flat buffer of gradients."""
        return [self._zero.grad_partitions_flat_buffer]

    def _all_chunks(self) -> Iterator[Chunk]:
        zero = self._zero
        ranks = dist.get_world_size(group=self.group(0))
        most = max(1, min(int(zero.reduce_bucket_size), max(LEAST_CHUNK, self.lengths[0])))
        begin, taken, size = 0, list[nn.Parameter](), 0
        for parameter in (held for parameters in zero.fp16_groups for held in parameters):
            part = int(parameter.partition_numel())
            if taken and (size + part) * ranks > most:
                yield self._chunk(taken, begin, ranks)
                begin, taken, size = begin + size, [], 0
            taken.append(parameter)
            size += part
        if taken:
            yield self._chunk(taken, begin, ranks)

    def _chunk(self, parameters: Sequence[nn.Parameter], begin: int, ranks: int) -> Chunk:
        """Return the chunk of these parameters, which are adjacent in the line.

        A line is an array of gradients that are reduced together. A chunk is sent in one message.
        """
        parts = [(held, int(held.partition_numel()), int(held.ds_numel)) for held in parameters]  # type: ignore[attr-defined]
        size, pieces = sum(part for _, part, _ in parts), []
        for rank in range(ranks):
            at = rank * size
            for held, part, numel in parts:
                start, stop = overlap((rank * part, (rank + 1) * part), (0, numel))
                if start < stop:
                    pieces.append(GradientPiece(held, start, at, stop - start))
                at += part
        return Chunk(0, tuple(pieces), (size,) * ranks, begin)


def cut(end: int, size: int, ranks: int, most: int, is_eager: bool) -> Iterator[list[Run]]:
    """Yield the ranges of each chunk of a line (the gradients that are reduced together).

    end: the number of elements in the line.
    size: the number of elements that each rank owns.
    ranks: the number of ranks.
    most: the largest number of elements in a chunk.
    is_eager: whether a chunk consists of adjacent elements, whose gradients arrive at about the same time. Otherwise it
        takes equally many elements from each rank's part, so that all ranks receive the same amount.

    A chunk is small enough that no rank receives more than it owns.
    """
    most = max(1, min(most, max(LEAST_CHUNK, size // ranks)))
    if is_eager:
        yield from ([(start, min(start + most, end))] for start in range(0, end, most))
        return
    step = max(1, most // ranks)
    for at in range(0, size, step):
        whole = [(rank * size + at, min(rank * size + at + step, (rank + 1) * size)) for rank in range(ranks)]
        yield [overlap(run, (0, end)) for run in whole]


def in_order(chunks: list[Chunk], order: Mapping[int, int]) -> list[Chunk]:
    """Return the chunks in the order of sending, with `freed` set: a parameter's gradient is dropped after its last
    chunk.

    order: a map from each parameter's id to its number in the module.
    """

    def reached(chunk: Chunk) -> int:
        return -min((order.get(id(piece.parameter), 0) for piece in chunk.pieces), default=0)

    found = sorted(chunks, key=reached)
    last = {piece.parameter: number for number, chunk in enumerate(found) for piece in chunk.pieces}
    freed: list[list[nn.Parameter]] = [[] for _ in found]
    for parameter, number in last.items():
        freed[number].append(parameter)
    return [replace(chunk, freed=tuple(done)) for chunk, done in zip(found, freed, strict=True)]


def _pieces(spans: list[Span], runs: list[Run]) -> Iterator[GradientPiece]:
    """Yield the pieces of parameters in a chunk, which holds these ranges of a line end to end.

    spans: the ranges of the parameters in the line.
    runs: the ranges of the line in the chunk.
    """
    base = 0
    for run in runs:
        for held, low, high in spans:
            start, stop = overlap(run, (low, high))
            if start < stop:
                yield GradientPiece(held, start - low, base + start - run[0], stop - start)
        base += run[1] - run[0]


def overlap(one: Run, other: Run) -> Run:
    """Return the common part of two ranges; an empty range if there is none."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))
