"""The executor, which carries out a member's moves in a switch. Every wait has a timeout."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.batched import BatchedMoves, DeviceLink
from ds_dynatrain.transfer.pulling import Pulling
from ds_dynatrain.transfer.ready import ReadyPlan
from ds_dynatrain.transfer.regions import Buffers, Regions, check_disjoint, copy_matrix, pairs
from ds_dynatrain.transfer.stream import Stream
from ds_dynatrain.transfer.transport import Transport

TAG = 1
"""Tag of all messages. One suffices: two members meet once in a plan, and messages with one tag keep their order."""


@dataclass(frozen=True)
class TransferStats:
    """Bytes that a member moved in a switch, and the duration of each phase.

    bytes_sent: bytes that reach other members in any way.
    bytes_local: bytes copied within the member.
    bytes_in_place: bytes that did not have to move.
    staging_peak: most bytes of staging memory in use at once.
    seconds_local: duration of the local copies.
    seconds_exchange: duration of the exchanges with other members.
    seconds_derived: duration of the casts.
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
    """Fill a member's target buffers according to its plan.

    The call runs local moves, reads from other accelerators, batches between accelerators, the plan's exchanges in
    order, and finally derived moves (casts within target buffers). Exchanges are started as far ahead as the memory
    budget allows, and finished in order. The first unfinished exchange of a member is also the first one of its peer,
    so members cannot deadlock.

    source: the buffers before the switch, keyed by (state kind, buffer name).
    target: the same for the buffers after the switch.
    deadline_seconds: limit for the whole call.
    link: needed if the plan has batches.

    All members must have prepared their plans for the same budget. A target buffer may share memory with a source
    buffer only where elements keep their addresses; any other overlap is refused, so source buffers are unchanged until
    the derived moves. Elements that no move writes (padding) are left unchanged.

    Raises TransferError before the first byte moves if the buffers do not fit the plan, TransferError if a connection
    fails, and MemberMissing when the deadline passes. After an error the target buffers and the transport are unusable.
    """
    begin = time.monotonic()
    deadline = begin + deadline_seconds
    for (kind, name), held in chain(source.items(), target.items()) if ready.on_host else ():
        if held.device.type != "cpu":
            raise TransferError(
                f"{kind} in {tuple(name)} lies on {held.device}, and the plan was made for members with host memory "
                "alone: make it with on_host=False on all of them"
            )
    read, written = ready.local[0].among(source), ready.local[1].among(target)
    lent, into, streams = [read], list[Regions](), list[tuple[Stream, Stream]]()
    for peer, sends, receives in ready.exchanges:
        lent.append(sends.places.among(source))
        into.append(receives.places.among(target))
        incoming = Stream(transport, peer, TAG, False, into[-1], receives.parcels, ready.staging)
        streams.append((incoming, Stream(transport, peer, TAG, True, lent[-1], sends.parcels, ready.staging)))
    others = list[Pulling | BatchedMoves]()
    if ready.sharing is not None and ready.pulls:
        others.append(Pulling(ready.sharing.memory, ready.pulls, source, target, transport))
    if ready.batches.exchanges:
        if link is None:
            peers = [each.peer for each in ready.batches.exchanges]
            raise TransferError(f"moves from and to members {peers} go by a link between devices, and there is none")
        others.append(BatchedMoves(ready.batches, source, target, transport, link))
    for other in others:
        lent, into = lent + other.lent, into + other.into
    for places in ready.derived:
        places.among(target)
    moved = np.flatnonzero((read.addresses() != written.addresses()) | (read.step != written.step))
    check_disjoint(lent, [written.select(moved), *into])
    for other in others:
        other.start()
    for stream in chain.from_iterable(streams[: ready.at_once]):  # overlap communication with local copies
        stream.advance()
    is_all = len(moved) == len(read.begin)
    read.copy_to(written, ready.copies if is_all else pairs(*ready.local, moved))
    local_done = time.monotonic()
    for other in others:
        other.run(deadline)
    _exchange(streams, ready.at_once, deadline)
    exchange_done = time.monotonic()
    for out_of, to in ready.casts:
        origin, place = ready.derived[0].keys[out_of.which], ready.derived[1].keys[to.which]
        copy_matrix(target[origin[:2]].detach(), out_of, target[place[:2]].detach(), to)
    derived_done = time.monotonic()
    nbytes = read.length * read.number
    bytes_moved = int(nbytes[moved].sum())
    return TransferStats(
        bytes_sent=ready.bytes_sent,
        bytes_local=bytes_moved,
        bytes_in_place=int(nbytes.sum()) - bytes_moved,
        staging_peak=ready.staging.peak + ready.batches.staging_bytes,
        seconds_local=local_done - begin,
        seconds_exchange=exchange_done - local_done,
        seconds_derived=derived_done - exchange_done,
    )


def _exchange(streams: list[tuple[Stream, Stream]], at_once: int, deadline: float) -> None:
    """Carry out exchanges in order, with up to `at_once` of them under way at a time.

    streams: for each exchange, the stream of received messages and the stream of sent ones. Receives are started before
    sends, so that buffers are ready for the peers' data.
    """
    for number, (incoming, outgoing) in enumerate(streams):
        while not (incoming.is_done and outgoing.is_done):
            incoming.advance()
            outgoing.advance()
            incoming.finish(deadline)
            outgoing.finish(deadline)
        for stream in chain.from_iterable(streams[number + at_once : number + at_once + 1]):
            stream.advance()
