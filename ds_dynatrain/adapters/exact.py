"""ZeRO stages 1 and 2 in an exact job: gradients of leaves, added in one order by whoever owns them.

DeepSpeed adds micro-batches where they were computed and ranks where the network does, in an order that follows from
the world. Here each micro-step sends every slice of every leaf's gradient to the slice's owner, by an all-to-all, and
the owner adds leaves in the order of their numbers (`exact.sums`). Both stages do this, with the same bits: stage 2 as
soon as gradients are there, stage 1 at the end of a backward pass, as it holds whole gradients anyway.

Gradients are sent in chunks of a group's flat line, by the same plan on every rank: a parameter that got no gradient is
sent as zeros, so ranks need not use the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import nn

from ds_dynatrain.adapters.versions import flat_offsets
from ds_dynatrain.exact import Grid, MicroStep, largest, level_of, levels_of, rest_of, square_sums
from ds_dynatrain.support import usage

LEAST_CHUNK = 1 << 20
"""Elements: a message that is worth its latency."""
Run = tuple[int, int]
"""From the first to behind the last element of a group's flat line."""


@dataclass(frozen=True)
class Piece:
    """`numel` elements of a parameter's gradient, from `start` on, which lie at `at` in a chunk."""

    parameter: nn.Parameter
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """Runs of a group's flat line, in its order.

    splits: how much of it each rank owns. begin: where this rank's part of it lies in what it owns. freed: the
    parameters of which nothing is left to send.
    """

    group: int
    pieces: tuple[Piece, ...]
    splits: tuple[int, ...]
    begin: int
    freed: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """Of all ranks."""
        return sum(self.splits)


class LeafSums:
    """The gradients of one ZeRO optimizer. order: of parameters in the module, by id; now: the micro-step that was
    dealt last, None where none was."""

    def __init__(self, zero: Any, order: Mapping[int, int], now: Callable[[], MicroStep | None]) -> None:
        self._zero, self._now = zero, now
        self._chunks = plan(zero, order)
        self._waits: dict[int, list[int]] = {}
        for number, chunk in enumerate(self._chunks):
            for parameter in {id(piece.parameter) for piece in chunk.pieces}:
                self._waits.setdefault(parameter, []).append(number)
        self._levels: dict[int, list[torch.Tensor]] = {}
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._done = 0
        self.forget()

    @staticmethod
    def put_on(zero: Any, order: Mapping[int, int], now: Callable[[], MicroStep | None]) -> LeafSums:
        """Let a ZeRO optimizer's gradients be summed so, and their norm be one that no holder makes a difference to."""
        sums = LeafSums(zero, order, now)
        zero.process_gradients = lambda parameter, group: sums.arrive(parameter)
        zero.overlapping_partition_gradients_reduce_epilogue = sums.finish
        zero.scaled_global_norm = lambda norm_type=2: global_norm(zero)
        return sums

    def forget(self) -> None:
        """No global batch is open, whatever was."""
        self._done = 0
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._missing = [len({id(piece.parameter) for piece in chunk.pieces}) for chunk in self._chunks]
        self._came: set[int] = set()

    def arrive(self, parameter: nn.Parameter) -> None:
        """A gradient is complete in this backward pass; at stage 2 the chunks are sent that are."""
        if not self._zero.partition_gradients or not parameter.numel():
            return
        if id(parameter) in self._came:
            raise usage("exact: a gradient in several parts").error()
        self._came.add(id(parameter))
        for number in self._waits[id(parameter)]:
            self._missing[number] -= 1
        while self._next < len(self._chunks) and not self._missing[self._next]:
            self._send_next()

    def finish(self) -> None:
        """A backward pass is over: what was not sent is; with the last one of a global batch DeepSpeed has the sums."""
        step = self._present()
        if step.number != self._done:
            raise usage("exact: a micro-batch that is no leaf").error(
                f"micro-step {step.number} of a global batch after {self._done} that were trained"
            )
        while self._next < len(self._chunks):
            self._send_next()
        self._begin()
        self._done += 1
        if self._zero.is_gradient_accumulation_boundary():
            self._done = 0
            for group in range(len(self._zero.bit16_groups)):
                self._zero.averaged_gradients[group] = [self._close(group, step.leaves)]

    def _present(self) -> MicroStep:
        step = self._now()
        if step is None:
            raise usage("exact: a micro-batch that is no leaf").error(
                "a backward pass without a micro-batch of a loader"
            )
        return step

    @torch.no_grad()
    def _send_next(self) -> None:
        chunk, step = self._chunks[self._next], self._present()
        self._next += 1
        own = step.own()
        if own:
            for row, leaf in zip(self._rows(chunk), own, strict=False):
                self._push(chunk, row, leaf)
        for parameter in chunk.freed:
            parameter.grad = None

    def _rows(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """What each rank has of this one's part of a chunk."""
        send, receive = self._memory()
        send = send[: chunk.numel]
        if sum(piece.numel for piece in chunk.pieces) < chunk.numel:
            send.zero_()  # between parameters that are aligned
        for piece in chunk.pieces:
            part, gradient = send[piece.at : piece.at + piece.numel], piece.parameter.grad
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1)[piece.start : piece.start + piece.numel])
        size = len(chunk.splits)
        if size == 1:
            return iter([send])
        group = self._zero.real_dp_process_group[chunk.group]
        mine = chunk.splits[dist.get_rank(group=group)]
        receive = receive[: mine * size]
        dist.all_to_all_single(receive, send, [mine] * size, list(chunk.splits), group=group)
        return iter(receive.view(size, mine))

    def _push(self, chunk: Chunk, row: torch.Tensor, leaf: int) -> None:
        levels, level = self._sums_of(chunk.group), level_of(leaf)
        place = slice(chunk.begin, chunk.begin + row.numel())
        for lower in range(level):
            into = levels[level][place] if lower == level - 1 else row
            torch.add(levels[lower][place], row, out=into)
        if not level:
            levels[0][place].copy_(row)

    def _close(self, group: int, leaves: int) -> torch.Tensor:
        """The sum of all leaves, of this rank's part of a group; no zero in it is negative."""
        levels = self._sums_of(group)
        newest, *older = rest_of(leaves)
        total = levels[newest]
        for level in older:
            total = torch.add(levels[level], total, out=levels[level])
        return total.add_(0.0)

    def _sums_of(self, group: int) -> list[torch.Tensor]:
        """The partial sums of a group by level. What is padding in them stays 0."""
        step = self._present()
        held = self._levels.setdefault(group, [])
        while len(held) < levels_of(step.leaves):
            master = self._zero.single_partition_of_fp32_groups[group]
            held.append(torch.zeros(int(self._zero.partition_size[group]), dtype=torch.float32, device=master.device))
        return held

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What chunks are sent from and received in."""
        if self._buffers is None:
            device = self._zero.single_partition_of_fp32_groups[0].device
            out = max(chunk.numel for chunk in self._chunks)
            into = max(max(chunk.splits) * len(chunk.splits) for chunk in self._chunks)
            self._buffers = tuple(torch.empty(size, dtype=torch.float32, device=device) for size in (out, into))  # type: ignore[assignment]
        return self._buffers  # type: ignore[return-value]


def plan(zero: Any, order: Mapping[int, int]) -> list[Chunk]:
    """The chunks of all groups as they are sent: the layers that a backward pass comes to first are the first."""
    found: list[tuple[int, Chunk]] = []
    for group, parameters in enumerate(zero.round_robin_bit16_groups):
        process_group, size = zero.real_dp_process_group[group], int(zero.partition_size[group])
        ranks, rank = dist.get_world_size(group=process_group), dist.get_rank(group=process_group)
        spans = [
            (parameter, offset, offset + parameter.numel())
            for parameter, offset in zip(parameters, flat_offsets(zero, group), strict=True)
        ]
        end = max(stop for _, _, stop in spans)
        for runs in _cut(end, size, ranks, int(zero.reduce_bucket_size), zero.partition_gradients):
            pieces = tuple(_pieces(spans, runs))
            owned = [[_overlap(run, (each * size, (each + 1) * size)) for run in runs] for each in range(ranks)]
            splits = tuple(sum(stop - start for start, stop in parts) for parts in owned)
            begin = min((start for start, stop in owned[rank] if start < stop), default=rank * size) - rank * size
            reached = min((order[id(piece.parameter)] for piece in pieces), default=0)
            found.append((reached, Chunk(group, pieces, splits, begin, ())))
    found.sort(key=lambda each: -each[0])
    return _freeing([chunk for _, chunk in found])


def _cut(end: int, size: int, ranks: int, most: int, is_eager: bool) -> Iterator[list[Run]]:
    """The runs of each chunk of a line of `end` elements, of which each rank owns `size`; at most `most` in a chunk.

    A chunk is as large as lets a rank receive no more than it owns. is_eager: a chunk is of neighbours, whose gradients
    are there at one time, else of as much from each rank's part, so that all receive alike.
    """
    if is_eager:
        step = max(1, min(most, max(LEAST_CHUNK, size // ranks)))
        yield from ([(start, min(start + step, end))] for start in range(0, end, step))
        return
    step = max(1, min(most, max(LEAST_CHUNK, size)) // ranks)
    for at in range(0, size, step):
        whole = [(rank * size + at, min(rank * size + at + step, (rank + 1) * size)) for rank in range(ranks)]
        yield [_overlap(run, (0, end)) for run in whole]


def _pieces(spans: list[tuple[nn.Parameter, int, int]], runs: list[Run]) -> Iterator[Piece]:
    """Of parameters that lie at (first, last) of a line, what lies in runs of it that a chunk has end to end."""
    base = 0
    for run in runs:
        for held, low, high in spans:
            start, stop = _overlap(run, (low, high))
            if start < stop:
                yield Piece(held, start - low, base + start - run[0], stop - start)
        base += run[1] - run[0]


def _overlap(one: Run, other: Run) -> Run:
    """What two runs have in common; empty if nothing."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _freeing(chunks: list[Chunk]) -> list[Chunk]:
    """With each parameter in the `freed` of the last chunk that has a piece of it."""
    last = {id(piece.parameter): number for number, chunk in enumerate(chunks) for piece in chunk.pieces}
    held = {id(piece.parameter): piece.parameter for chunk in chunks for piece in chunk.pieces}
    freed: list[list[nn.Parameter]] = [[] for _ in chunks]
    for parameter, number in last.items():
        freed[number].append(held[parameter])
    return [
        Chunk(chunk.group, chunk.pieces, chunk.splits, chunk.begin, tuple(done))
        for chunk, done in zip(chunks, freed, strict=True)
    ]


def global_norm(zero: Any) -> torch.Tensor:
    """The norm of all gradients, of no dims in fp32, whoever holds them; inf where one is not finite.

    What is counted are the elements of the model: padding, which depends on the world, would make another grid.
    """
    parts = [part.numpy() for parts in zero.averaged_gradients.values() for part in parts]
    most = torch.tensor([max(map(largest, parts))], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=zero.dp_process_group)
    if not 0 < float(most) < math.inf:
        return most[0].to(torch.float32)
    count = sum(parameter.numel() for parameters in zero.bit16_groups for parameter in parameters)
    grid = Grid.of(float(most), count)
    sums = torch.tensor([square_sums(part, grid) for part in parts], dtype=torch.int64).sum(0)
    dist.all_reduce(sums, group=zero.dp_process_group)
    return torch.tensor(math.sqrt(grid.total(*sums.tolist())), dtype=torch.float32)
