"""The executor: carries a member's part of a plan out, shard to shard, and waits for nobody without a limit."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan import Exchange, MemberPlan, Moves
from ds_dynatrain.space.tensor import Ints
from ds_dynatrain.transfer.messages import Message, messages
from ds_dynatrain.transfer.regions import Buffers, Regions, check_disjoint, regions
from ds_dynatrain.transfer.series import series
from ds_dynatrain.transfer.stream import SLOTS, Staging, Stream
from ds_dynatrain.transfer.transport import MESSAGE_BYTES, Transport

CHUNK_BYTES = 4 * 1024 * 1024
"""Longest staged message; all slots of both directions full are 32 MiB."""
MINIMUM_BUDGET_BYTES = 64 * 1024
TAG = 1
"""Two members meet once in a plan and messages of one tag keep their order, so one tag does for all."""
_BUFFERS = ("kind", "source_kind", "source_buffer", "target_buffer")
"""What two moves must have in common to be parts of one copy."""


@dataclass(frozen=True)
class TransferStats:
    """What a member's part of a switch moved, in bytes, and how long each phase took.

    bytes_in_place: stayed where it lay. bytes_local: copied within the member. bytes_derived: written by casts and
    second copies. staging_peak: most staging bytes in use at once. seconds is the whole, the other times are its
    parts.
    """

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    bytes_in_place: int
    bytes_derived: int
    staging_peak: int
    seconds: float
    seconds_local: float
    seconds_exchange: float
    seconds_derived: float


def execute(
    plan: MemberPlan,
    source: Buffers,
    target: Buffers,
    transport: Transport,
    deadline_seconds: float,
    budget_bytes: int,
) -> TransferStats:
    """Fill the target buffers: local moves, then the exchanges in the plan's order, then the derived moves.

    `deadline_seconds` bounds the whole call; `budget_bytes` bounds staging and must be the same on every member.
    Target buffers may be the source's own where an element keeps its place; any other sharing of memory is refused,
    so source buffers are unchanged until the derived moves. Elements that no move writes (padding) are left alone.

    Raises TransferError before the first byte for buffers that do not fit the plan, MemberMissing when the deadline
    passes, TransferError when a connection fails. After an error the target buffers and the transport are of no use.
    """
    if budget_bytes < MINIMUM_BUDGET_BYTES:
        raise TransferError(f"a budget of {budget_bytes} bytes is below the least of {MINIMUM_BUDGET_BYTES}: raise it")
    begin = time.monotonic()
    deadline = begin + deadline_seconds
    staging = Staging(min(CHUNK_BYTES, budget_bytes // (2 * SLOTS)))
    read, written = regions(plan.local, source, "source"), regions(plan.local, target, "target")
    exchanges = [_resolve(exchange, source, target) for exchange in plan.rounds]
    is_kept = read.addresses() == written.addresses()
    check_disjoint(
        [read, *(sends for sends, _ in exchanges)],
        [_rows(written, np.flatnonzero(~is_kept)), *(receives for _, receives in exchanges)],
    )
    streams = [
        _streams(exchange.peer, *both, transport, staging)
        for exchange, both in zip(plan.rounds, exchanges, strict=True)
    ]
    for stream in streams[0] if streams else ():  # the wire works while this member copies
        stream.advance()
    moved = np.flatnonzero(~is_kept)
    _rows(read, moved).copy_to(_rows(written, moved))
    local_done = time.monotonic()
    for incoming, outgoing in streams:
        _exchange(incoming, outgoing, deadline)
    exchange_done = time.monotonic()
    _derive(plan.derived, target)
    end = time.monotonic()
    return TransferStats(
        bytes_sent=sum(int(sends.length.sum()) for sends, _ in exchanges),
        bytes_received=sum(int(receives.length.sum()) for _, receives in exchanges),
        bytes_local=int(read.length[~is_kept].sum()),
        bytes_in_place=int(read.length[is_kept].sum()),
        bytes_derived=_bytes_written(plan.derived),
        staging_peak=staging.peak,
        seconds=end - begin,
        seconds_local=local_done - begin,
        seconds_exchange=exchange_done - local_done,
        seconds_derived=end - exchange_done,
    )


def _resolve(exchange: Exchange, source: Buffers, target: Buffers) -> tuple[Regions, Regions]:
    return regions(exchange.sends, source, "source"), regions(exchange.receives, target, "target")


def _rows(found: Regions, rows: Ints) -> Regions:
    return Regions(found.data, found.which[rows], found.begin[rows], found.length[rows])


def _streams(
    peer: int, sends: Regions, receives: Regions, transport: Transport, staging: Staging
) -> tuple[Stream, Stream]:
    """Both directions with one peer: (incoming, outgoing)."""
    incoming = Stream(transport, peer, TAG, False, receives, _cut(receives, staging.chunk), staging)
    outgoing = Stream(transport, peer, TAG, True, sends, _cut(sends, staging.chunk), staging)
    return incoming, outgoing


def _exchange(incoming: Stream, outgoing: Stream, deadline: float) -> None:
    """Both directions at once; receives are started before sends, so that a peer's data finds its place."""
    while not (incoming.is_done and outgoing.is_done):
        incoming.advance()
        outgoing.advance()
        incoming.finish(deadline)
        outgoing.finish(deadline)


def _cut(found: Regions, chunk: int) -> list[Message]:
    """On an accelerator every message is staged, so none exceeds a chunk; the peer has the same type of device."""
    on_host = all(data.device.type == "cpu" for data in found.data)
    return messages(found.length.tolist(), chunk, MESSAGE_BYTES if on_host else chunk)


def _derive(moves: Moves, target: Buffers) -> None:
    """Casts and second copies within the target buffers, in order; rounding is torch's (to nearest, ties to even)."""
    regions(moves, target, "source")
    regions(moves, target, "target")
    first, length = _neighbors(moves)
    source, written = moves.source_offset[first], moves.target_offset[first]
    same = np.zeros(len(first), dtype=np.int64)
    for column in (*(getattr(moves, name)[first] for name in _BUFFERS), length):
        same = same * (int(column.max(initial=0)) + 1) + column
    for row, count in zip(*series(same, source, written), strict=True):
        move = next(iter(moves.select(slice(int(first[row]), int(first[row]) + 1))))
        origin, into = target[move.source_kind, move.source_buffer], target[move.kind, move.target_buffer]
        rows = slice(int(row), int(row) + int(count))
        _copy_series(origin.detach(), source[rows], into.detach(), written[rows], int(length[row]))


def _neighbors(moves: Moves) -> tuple[Ints, Ints]:
    """(first row, elements) of rows that follow one another in both buffers, wherever they lie on the line."""
    if not len(moves):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    length = moves.stop - moves.start
    joined = np.ones(len(moves) - 1, dtype=bool)
    for name in _BUFFERS:
        joined &= np.diff(getattr(moves, name)) == 0
    for name in ("source_offset", "target_offset"):
        joined &= np.diff(getattr(moves, name)) == length[:-1]
    first = np.flatnonzero(np.append(True, ~joined))
    return first, np.add.reduceat(length, first)


def _copy_series(origin: torch.Tensor, begins: Ints, into: torch.Tensor, targets: Ints, length: int) -> None:
    """Copy runs of one length at equal steps between flat buffers: as matrices, or one by one where steps go back."""
    sides = ((origin, begins.tolist()), (into, targets.tolist()))
    if len(begins) == 1 or any(at[1] - at[0] < length for _, at in sides):
        for begin, at in zip(sides[0][1], sides[1][1], strict=True):
            into[at : at + length].copy_(origin[begin : begin + length])
        return
    read, written = (
        held.as_strided((len(at), length), (at[1] - at[0], 1), held.storage_offset() + at[0]) for held, at in sides
    )
    written.copy_(read)


def _bytes_written(moves: Moves) -> int:
    itemsize = np.array([kind.itemsize for kind in moves.kinds], dtype=np.int64)[moves.kind]
    return int(((moves.stop - moves.start) * itemsize).sum())
