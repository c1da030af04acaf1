"""The executor: carries out a member's part of a plan, shard to shard; every wait has a time limit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import BufferId
from ds_dynatrain.transfer.batched import BatchedMoves, DeviceLink
from ds_dynatrain.transfer.pulling import Pulling
from ds_dynatrain.transfer.ready import Cast, ReadyPlan, copies
from ds_dynatrain.transfer.regions import Buffers, check_disjoint
from ds_dynatrain.transfer.stream import Stream
from ds_dynatrain.transfer.transport import Transport

TAG = 1
"""Tag of all messages: two members meet once in a plan, and messages of one tag keep their order."""


@dataclass(frozen=True)
class TransferStats:
    """Bytes that a member's part of a switch moved, and the duration of each phase.

    bytes_in_place: bytes that stayed where they lay. bytes_local: bytes copied within the member. staging_peak: most
    staging bytes in use at once.
    """

    bytes_sent: int
    bytes_local: int
    bytes_in_place: int
    staging_peak: int
    seconds_local: float
    seconds_exchange: float
    seconds_derived: float


def execute(
    ready: ReadyPlan,
    source: Buffers,
    target: Buffers,
    transport: Transport,
    deadline_seconds: float,
    link: DeviceLink | None = None,
) -> TransferStats:
    """Fill the target buffers: by local moves, reads of other accelerators, batches between them, the plan's exchanges
    in order, and derived moves.

    Exchanges are started as far ahead as the budget allows, and waited for in order. The first exchange that is not
    finished is the first one for both of its members, so no circle of waiting members can arise.

    `deadline_seconds` bounds the whole call. Plans must have been made ready for the same budget on every member. link:
    for a plan that has batches. Target buffers may be the source's own where an element keeps its place; any other
    sharing of memory is refused, so source buffers are unchanged until the derived moves. Elements that no move writes
    (padding) are left alone.

    Raises TransferError before the first byte for buffers that do not fit the plan, MemberMissing when the deadline
    passes, TransferError when a connection fails. After an error the target buffers and the transport are of no use.
    """
    begin = time.monotonic()
    deadline = begin + deadline_seconds
    _check_devices(ready, chain(source.items(), target.items()))
    read, written = ready.local[0].among(source), ready.local[1].among(target)
    exchanges = [(sends.places.among(source), got.places.among(target)) for _, sends, got in ready.exchanges]
    memory = None if ready.sharing is None else ready.sharing.memory
    pulling = Pulling(memory, ready.pulls, source, target, transport)
    batched = BatchedMoves(ready.batches, source, target, transport, link)
    for places in ready.derived:
        places.among(target)
    moved = np.flatnonzero(read.addresses() != written.addresses())
    check_disjoint(
        [read, *(sends for sends, _ in exchanges), *pulling.lent, *batched.lent],
        [written.rows(moved), *(receives for _, receives in exchanges), *pulling.into, *batched.into],
    )
    pulling.start()
    batched.start()
    streams = [
        (
            Stream(transport, peer, TAG, False, receives, into.parcels, ready.staging),
            Stream(transport, peer, TAG, True, sends, out.parcels, ready.staging),
        )
        for (peer, out, into), (sends, receives) in zip(ready.exchanges, exchanges, strict=True)
    ]
    for stream in chain.from_iterable(streams[: ready.at_once]):  # the wire works while this member copies
        stream.advance()
    is_all = len(moved) == len(read.begin)
    read.copy_to(written, ready.copies if is_all else copies(*ready.local, moved))
    local_done = time.monotonic()
    pulling.run(deadline)
    batched.run(deadline)
    _exchange(streams, ready.at_once, deadline)
    exchange_done = time.monotonic()
    for cast in ready.casts:
        _cast(target[cast.source].detach(), target[cast.target].detach(), cast)
    derived_done = time.monotonic()
    bytes_moved = int(read.length[moved].sum())
    return TransferStats(
        bytes_sent=ready.bytes_sent,
        bytes_local=bytes_moved,
        bytes_in_place=int(read.length.sum()) - bytes_moved,
        staging_peak=ready.staging.peak + ready.batches.staging_bytes,
        seconds_local=local_done - begin,
        seconds_exchange=exchange_done - local_done,
        seconds_derived=derived_done - exchange_done,
    )


def _check_devices(ready: ReadyPlan, buffers: Iterable[tuple[tuple[str, BufferId], torch.Tensor]]) -> None:
    """Raise TransferError for a buffer on a device that the plan, and so the other members, does not know of."""
    for (kind, name), held in buffers:
        if ready.on_host and held.device.type != "cpu":
            raise TransferError(
                f"{kind} in {tuple(name)} lies on {held.device}, and the plan was made for members with host memory "
                "alone: make it with on_host=False on all of them"
            )


def _exchange(streams: list[tuple[Stream, Stream]], at_once: int, deadline: float) -> None:
    """Carry out exchanges in order; when one is finished, the next waiting one begins.

    Receives are started before sends, so that a peer's data finds its place.
    """
    for number, (incoming, outgoing) in enumerate(streams):
        while not (incoming.is_done and outgoing.is_done):
            incoming.advance()
            outgoing.advance()
            incoming.finish(deadline)
            outgoing.finish(deadline)
        for stream in chain.from_iterable(streams[number + at_once : number + at_once + 1]):
            stream.advance()


def _cast(origin: torch.Tensor, into: torch.Tensor, cast: Cast) -> None:
    """Copy runs of one length at equal steps, as matrices, or one by one if steps go back.

    Rounding is torch's (to nearest, ties to even).
    """
    length, sides = cast.length, ((origin, cast.read), (into, cast.written))
    if len(cast.read) == 1 or any(at[1] - at[0] < length for _, at in sides):
        for begin, at in zip(cast.read, cast.written, strict=True):
            into[at : at + length].copy_(origin[begin : begin + length])
        return
    read, written = (
        held.as_strided((len(at), length), (at[1] - at[0], 1), held.storage_offset() + at[0]) for held, at in sides
    )
    written.copy_(read)
