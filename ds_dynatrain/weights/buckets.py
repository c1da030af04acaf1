"""Buckets: groups of output tensors that one collective gathers on the ranks that need them (the destinations).

A bucket is a layer of the model, together with small tensors next to it. A rank sends only elements that it owns and
that the destination does not hold. A destination reads the elements that it holds from its own memory.

Gathering a bucket needs memory for the bucket and for its largest tensor. The latter is not needed if the parts of each
tensor arrive in order, as those of an embedding do in ZeRO-3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.checkpoint.extents import placed
from ds_dynatrain.space import BufferId, CoordinateLine, Pieces, Sharding, interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.weights.outputs import BEFORE, Output, TensorRun, batches

LARGE_BYTES = 32 << 20
"""Size in bytes above which a tensor outside the layers has its own bucket. An embedding is larger than a layer."""
FEW_PIECES = 32
"""Number of pieces up to which copying them one by one is faster than searching for rows of equal length."""
ALONE = "alone"
PACKED = BufferId("packed", 0)
"""The buffer into which elements of other ranks are received."""
_TARGET = BufferId("target", 0)
Memory = Mapping[BufferId, torch.Tensor]


def bucketed(outputs: Sequence[Output], itemsize: int, most: int | None) -> list[list[Output]]:
    """Divide outputs, which are ordered by layer, into buckets.

    most: the maximum size of a bucket in bytes; a larger tensor gets its own bucket. None for one bucket per layer. In
        that case a large tensor outside the layers gets its own bucket, and small ones join the bucket of the layer
        next to them.
    """
    if most is not None:
        return list(batches(outputs, lambda output: output.numel * itemsize, most))
    found, beside = list[list[Output]](), ALONE
    for output in outputs:
        is_alone = output.is_outside and output.numel * itemsize > LARGE_BYTES
        if is_alone or beside == ALONE or not (output.is_outside or beside in (BEFORE, output.layer)):
            found.append([])
        found[-1].append(output)
        beside = ALONE if is_alone else output.layer
    return found


@dataclass(frozen=True, eq=False)
class Gathering:
    """One rank's part in the collective that gathers a bucket on its destinations.

    line: the coordinate line: all logical tensors end to end.
    shipments: a map from each destination to the elements that this rank sends, as pieces of its own buffers and of the
        send buffer.
    counts: the number of elements that this rank receives from each rank.
    parts: on a destination, all elements of the bucket after the collective; None on other ranks.
    is_needed: whether any destination lacks an element; equal on all ranks.
    """

    line: CoordinateLine
    ranks: int
    shipments: Mapping[int, tuple[Pieces, Pieces]]
    counts: Ints
    parts: Pieces | None
    is_needed: bool

    @staticmethod
    def of(
        line: CoordinateLine,
        sharding: Sharding,
        rank: int,
        tensors: Iterable[int],
        owned: Pieces,
        holdings: Mapping[int, Pieces],
    ) -> Gathering:
        """Compute what each rank sends and receives for a bucket, without communication.

        tensors: the numbers of the logical tensors that the bucket needs.
        owned: the elements of all tensors that this rank owns.
        holdings: a map from each destination to the elements that it holds.
        """
        numbers = np.array(sorted(set(tensors)), dtype=np.int64)
        start, stop = interval.union(line.bases[numbers], line.bases[numbers + 1])
        shipments, parts, is_needed = dict[int, tuple[Pieces, Pieces]](), None, False
        counts, at = np.zeros(sharding.ranks, np.int64), 0
        for destination, holding in holdings.items():
            held = holding.restrict(start, stop)
            _, low, high = interval.subtract(start, stop, *interval.union(held.start, held.stop))
            _, low, high, owner = sharding.owners(low, high)
            is_needed |= bool(len(low))
            mine = owner == rank
            if mine.any():
                order = np.argsort(low[mine])
                sent = owned.restrict(low[mine][order], high[mine][order])
                shipments[destination] = sent, _end_to_end(sent.start, sent.stop, at)
                at += sent.numel
            if destination == rank:
                np.add.at(counts, owner, high - low)
                order = np.lexsort((low, owner))
                parts = _joined(held, _end_to_end(low[order], high[order], 0))
        return Gathering(line, sharding.ranks, shipments, counts, parts, is_needed)

    @property
    def sent(self) -> int:
        """Number of elements that this rank sends."""
        return sum(held.numel for held, _ in self.shipments.values())

    @property
    def received(self) -> int:
        """Number of elements that this rank receives."""
        return int(self.counts.sum())

    def run(self, live: Memory, send: torch.Tensor, got: torch.Tensor, group: td.ProcessGroup) -> None:
        """Send and receive the elements of the bucket. All ranks must call this together, and only if `is_needed`.

        live: this rank's weights.
        send: memory for at least `sent` elements.
        got: memory for at least `received` elements.
        """
        send, got, sizes = send[: self.sent], got[: self.received], [0] * self.ranks
        for destination, (held, packed) in sorted(self.shipments.items()):
            sizes[destination] = held.numel
            for _, _, (here, there) in placed(self.line, (held, packed), (dict(live), {PACKED: send})):
                there.copy_(here)
        itemsize = send.element_size()
        td.all_to_all_single(
            got.view(torch.uint8),
            send.view(torch.uint8),
            [count * itemsize for count in self.counts.tolist()],
            [size * itemsize for size in sizes],
            group=group,
        )


def _end_to_end(start: Ints, stop: Ints, at: int) -> Pieces:
    """Return pieces that describe the ranges [start, stop) packed back to back in the buffer PACKED.

    at: the offset of the first range in the buffer.
    """
    ends = np.cumsum(stop - start)
    return Pieces(start, stop, np.zeros_like(start), at + ends - (stop - start), (PACKED,))


def _joined(held: Pieces, packed: Pieces) -> Pieces:
    """Merge two sets of pieces and sort them. The buffers of `held` come first in the result."""
    columns = packed.start, packed.stop, packed.buffer + len(held.buffers), packed.offset
    start, stop, buffer, offset = interval.join([held.columns, columns])
    return Pieces(start, stop, buffer, offset, (*held.buffers, PACKED)).tidy()


def assembled(
    line: CoordinateLine, output: Output, parts: Pieces, memory: Memory, like: torch.Tensor, copies: bool = False
) -> torch.Tensor:
    """Return an output tensor assembled from the parts of a bucket: a view if it is contiguous in memory, else a copy.

    memory: the buffers of the parts.
    like: a tensor with the output's type and device.
    copies: whether to return a copy in any case.
    """
    found = None if copies else _view(line, output, parts, memory)
    if found is not None:
        return found
    flat = torch.empty(output.numel, dtype=like.dtype, device=like.device)
    for here, there in matched(line, output, parts, memory, flat):
        there.copy_(here)
    whole = flat.view(output.shape)
    for delta in output.deltas:  # computed the way peft merges adapters
        up, down = (assembled(line, each, parts, memory, like).float() for each in (delta.up, delta.down))
        added = (up @ down).T if delta.is_transposed else up @ down
        whole += (added * delta.scaling).to(whole.dtype)
    return whole


def pieces_of(line: CoordinateLine, run: TensorRun, held: Pieces) -> Pieces:
    """Return the part of `held` that contains the elements of a run of one tensor."""
    base = int(line.bases[run.tensor])
    return held.restrict(interval.ints([base + run.start]), interval.ints([base + run.stop]))


def matched(
    line: CoordinateLine, output: Output, parts: Pieces, memory: Memory, flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of blocks with the same elements of an output: one in the parts' memory, one in the flat tensor
    `flat`.
    """
    for run in output.runs:
        pieces = pieces_of(line, run, parts)
        offset = pieces.start - int(line.bases[run.tensor]) - run.start + run.at
        if len(pieces) <= FEW_PIECES:
            for piece, at in zip(pieces, offset.tolist(), strict=True):
                count = piece.stop - piece.start
                yield memory[piece.buffer].detach().narrow(0, piece.offset, count), flat.narrow(0, at, count)
            continue
        target = Pieces(pieces.start, pieces.stop, np.zeros_like(offset), offset, (_TARGET,))
        for _, _, (here, there) in placed(line, (pieces, target), (dict(memory), {_TARGET: flat})):
            yield here, there


def _view(line: CoordinateLine, output: Output, parts: Pieces, memory: Memory) -> torch.Tensor | None:
    """Return the output tensor as a view of `memory`; None if its elements are not contiguous there."""
    if len(output.runs) != 1 or output.deltas:
        return None
    pieces = pieces_of(line, output.runs[0], parts)
    if len(pieces) != 1 or pieces.numel != math.prod(output.shape):
        return None
    piece = next(iter(pieces))
    return memory[piece.buffer].detach().narrow(0, piece.offset, output.numel).view(output.shape)
