"""The executor, which carries out a member's moves in a switch. Every wait has a timeout."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.batched import BatchedMoves, DeviceLink
from ds_dynatrain.transfer.pulling import Pulling
from ds_dynatrain.transfer.ready import Phase, ReadyPlan
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

    The call runs local moves, the phases of the plan, and finally derived moves (casts within target buffers). A phase
    has reads from other accelerators, batches between accelerators, and exchanges in order. These are started as far
    ahead as the memory budget allows, and finished in order. The first unfinished exchange of a member is also the
    first one of its peer, so members cannot deadlock.

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
    phases = [
        _Running.of(ready, phase, held, target, transport, link)
        for phase, held in zip(ready.phases, (source, target), strict=False)
    ]
    for places in ready.derived:
        places.among(target)
    moved = np.flatnonzero((read.addresses() != written.addresses()) | (read.step != written.step))
    into = [regions for phase in phases for regions in phase.into]
    check_disjoint([read, *phases[0].lent], [written.select(moved), *into])
    phases[0].start(ready.at_once)  # overlap communication with local copies
    is_all = len(moved) == len(read.begin)
    read.copy_to(written, ready.copies if is_all else pairs(*ready.local, moved))
    local_done = time.monotonic()
    for number, phase in enumerate(phases):
        if number:
            phase.start(ready.at_once)
        phase.run(ready.at_once, deadline)
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
        staging_peak=ready.staging.peak + max(phase.batches.staging_bytes for phase in ready.phases),
        seconds_local=local_done - begin,
        seconds_exchange=exchange_done - local_done,
        seconds_derived=derived_done - exchange_done,
    )


@dataclass(frozen=True)
class _Running:
    """A phase between buffers in memory.

    streams: for each exchange, the stream of received messages and the stream of sent ones. Receives are started before
    sends, so that buffers are ready for the peers' data.
    others: reads from other accelerators, and batches between accelerators.
    lent, into: the regions that the phase reads and writes.
    """

    streams: list[tuple[Stream, Stream]]
    others: list[Pulling | BatchedMoves]
    lent: list[Regions]
    into: list[Regions]

    @staticmethod
    def of(
        ready: ReadyPlan, phase: Phase, source: Buffers, target: Buffers, transport: Transport, link: DeviceLink | None
    ) -> _Running:
        """Return the transfers of one phase, which have not been started yet.

        source: the buffers that the phase reads.
        """
        streams, others, lent, into = list[tuple[Stream, Stream]](), list[Pulling | BatchedMoves](), [], []
        for peer, sends, receives in phase.exchanges:
            lent.append(sends.places.among(source))
            into.append(receives.places.among(target))
            incoming = Stream(transport, peer, TAG, False, into[-1], receives.parcels, ready.staging)
            streams.append((incoming, Stream(transport, peer, TAG, True, lent[-1], sends.parcels, ready.staging)))
        if ready.sharing is not None and phase.pulls:
            others.append(Pulling(ready.sharing.memory, phase.pulls, source, target, transport))
        if phase.batches.exchanges:
            if link is None:
                peers = [each.peer for each in phase.batches.exchanges]
                raise TransferError(
                    f"moves from and to members {peers} go by a link between devices, and there is none"
                )
            others.append(BatchedMoves(phase.batches, source, target, transport, link))
        for other in others:
            lent, into = lent + other.lent, into + other.into
        return _Running(streams, others, lent, into)

    def start(self, at_once: int) -> None:
        """Start the first `at_once` exchanges, and all that is not an exchange."""
        for other in self.others:
            other.start()
        for stream in chain.from_iterable(self.streams[:at_once]):
            stream.advance()

    def run(self, at_once: int, deadline: float) -> None:
        """Carry the phase out, its exchanges in order, with up to `at_once` of them under way at a time."""
        for other in self.others:
            other.run(deadline)
        for number, (incoming, outgoing) in enumerate(self.streams):
            while not (incoming.is_done and outgoing.is_done):
                incoming.advance()
                outgoing.advance()
                incoming.finish(deadline)
                outgoing.finish(deadline)
            for stream in chain.from_iterable(self.streams[number + at_once : number + at_once + 1]):
                stream.advance()
