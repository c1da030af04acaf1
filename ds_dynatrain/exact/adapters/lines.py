"""Whose gradients lie where: what the sums of an exact job need to know of ZeRO stages 1 and 2, and of stage 3.

A *line* is what a rank owns of the gradients that are reduced together: of an optimizer group in stages 1 and 2, of all
parameters in stage 3. A *chunk* is sent at once; each rank owns a part of it, which lies in one piece of its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_dynatrain.adapters.versions import flat_offsets

LEAST_CHUNK = 1 << 20
"""Elements: a message that is worth its latency."""
Run = tuple[int, int]
"""From the first to behind the last element of a line."""
Span = tuple[nn.Parameter, int, int]
"""A parameter, and the run of a line that is its gradient."""


@dataclass(frozen=True)
class Piece:
    """`numel` elements of a parameter's gradient, from `start` on, which lie at `at` in a chunk."""

    parameter: nn.Parameter
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """What is sent at once, in the order of its owners; between pieces there are zeros.

    line: its number. splits: how much of it each rank owns. begin: where this rank's part of it lies in its line.
    freed: the parameters of which nothing is left to send.
    """

    line: int
    pieces: tuple[Piece, ...]
    splits: tuple[int, ...]
    begin: int
    freed: tuple[nn.Parameter, ...] = ()

    @property
    def numel(self) -> int:
        """Of all ranks."""
        return sum(self.splits)


class Lines:
    """The gradients of one ZeRO optimizer, base of those of its stages.

    is_eager: whether chunks are sent while a backward pass still runs. chunks: as they are sent: the layers that a
    backward pass comes to first are the first. lengths: what this rank owns of each line, padding counted.
    """

    is_eager = True
    chunks: list[Chunk]
    lengths: list[int]

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def numel(self) -> int:
        """Elements of the whole model that have a gradient."""
        raise NotImplementedError

    @property
    def sharing(self) -> list[Any]:
        """The process groups over which what `held` gives is the whole gradient, each element once."""
        return [self._zero.dp_process_group]

    def group(self, line: int) -> Any:
        """Return the process group whose ranks own a line."""
        return self._zero.dp_process_group

    def take(self, line: int, total: torch.Tensor) -> None:
        """Let DeepSpeed go on with the sum of a whole global batch."""
        raise NotImplementedError

    def held(self) -> list[torch.Tensor]:
        """Return the sums that DeepSpeed has, in fp32; padding is 0."""
        raise NotImplementedError


def lines_of(zero: Any, order: Mapping[int, int]) -> Lines | None:
    """Those of an optimizer of stages 1 to 3, None of another one. order: of parameters in the module, by id."""
    if isinstance(zero, DeepSpeedZeroOptimizer):
        return FlatLines(zero, order)
    return CutLines(zero, order) if isinstance(zero, DeepSpeedZeroOptimizer_Stage3) else None


class FlatLines(Lines):
    """Stages 1 and 2: a group's parameters lie end to end, and are cut into equal parts, wherever one begins."""

    def __init__(self, zero: Any, order: Mapping[int, int]) -> None:
        super().__init__(zero)
        self.is_eager = bool(zero.partition_gradients)
        self.lengths = [int(size) for size in zero.partition_size]
        lines = range(len(self.lengths))
        self.spans = [_end_to_end(zero.round_robin_bit16_groups[line], flat_offsets(zero, line)) for line in lines]
        self.chunks = in_order([chunk for line in lines for chunk in self._chunks_of(line)], order)

    @property
    def numel(self) -> int:
        """See `Lines`."""
        return sum(stop - start for spans in self.spans for _, start, stop in spans)

    def group(self, line: int) -> Any:
        """See `Lines`."""
        return self._zero.real_dp_process_group[line]

    def take(self, line: int, total: torch.Tensor) -> None:
        """See `Lines`."""
        self._zero.averaged_gradients[line] = [total]

    def held(self) -> list[torch.Tensor]:
        """See `Lines`."""
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
    """Stage 3: each parameter is cut into equal parts, the last of them with padding; parts lie end to end."""

    def __init__(self, zero: Any, order: Mapping[int, int]) -> None:
        super().__init__(zero)
        self.lengths = [zero.grad_partitions_flat_buffer.numel()]
        self.chunks = in_order(list(self._all_chunks()), order)

    @property
    def numel(self) -> int:
        """See `Lines`."""
        return sum(int(held.ds_numel) for parameters in self._zero.fp16_groups for held in parameters)

    def take(self, line: int, total: torch.Tensor) -> None:
        """See `Lines`. What a parameter got last is state here, and is this."""
        zero, position = self._zero, 0
        zero.grad_partitions_flat_buffer.copy_(total)
        for number, parameters in enumerate(zero.fp16_groups):
            parts = []
            for parameter in parameters:
                parts.append(zero.grad_partitions_flat_buffer.narrow(0, position, parameter.partition_numel()))
                position += parameter.partition_numel()
            zero.averaged_gradients[number] = parts

    def held(self) -> list[torch.Tensor]:
        """See `Lines`."""
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
        """Of parameters that are neighbours in the line."""
        parts = [(held, int(held.partition_numel()), int(held.ds_numel)) for held in parameters]  # type: ignore[attr-defined]
        size, pieces = sum(part for _, part, _ in parts), []
        for rank in range(ranks):
            at = rank * size
            for held, part, numel in parts:
                start, stop = overlap((rank * part, (rank + 1) * part), (0, numel))
                if start < stop:
                    pieces.append(Piece(held, start, at, stop - start))
                at += part
        return Chunk(0, tuple(pieces), (size,) * ranks, begin)


def cut(end: int, size: int, ranks: int, most: int, is_eager: bool) -> Iterator[list[Run]]:
    """The runs of each chunk of a line of `end` elements, of which each rank owns `size`; at most `most` in a chunk.

    A chunk is as large as lets a rank receive no more than it owns. is_eager: a chunk is of neighbours, whose gradients
    are there at one time, else of as much from each rank's part, so that all receive alike.
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
    """As they are sent, each parameter in the `freed` of the last chunk that has a piece of it."""

    def reached(chunk: Chunk) -> int:
        return -min((order.get(id(piece.parameter), 0) for piece in chunk.pieces), default=0)

    found = sorted(chunks, key=reached)
    held = {id(piece.parameter): piece.parameter for chunk in found for piece in chunk.pieces}
    last = {id(piece.parameter): number for number, chunk in enumerate(found) for piece in chunk.pieces}
    freed: list[list[nn.Parameter]] = [[] for _ in found]
    for parameter, number in last.items():
        freed[number].append(held[parameter])
    return [replace(chunk, freed=tuple(done)) for chunk, done in zip(found, freed, strict=True)]


def _end_to_end(parameters: Sequence[nn.Parameter], offsets: Sequence[int]) -> list[Span]:
    placed = zip(parameters, offsets, strict=True)
    return [(parameter, offset, offset + parameter.numel()) for parameter, offset in placed]


def _pieces(spans: list[Span], runs: list[Run]) -> Iterator[Piece]:
    """Of parameters that lie at (first, last) of a line, what lies in runs of it that a chunk has end to end."""
    base = 0
    for run in runs:
        for held, low, high in spans:
            start, stop = overlap(run, (low, high))
            if start < stop:
                yield Piece(held, start - low, base + start - run[0], stop - start)
        base += run[1] - run[0]


def overlap(one: Run, other: Run) -> Run:
    """What two runs have in common; empty if nothing."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))
