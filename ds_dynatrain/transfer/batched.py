"""Moves between accelerators through the collectives library (such as NCCL), as messages that start in batches.

Batch j of a member contains the j-th bundle of messages to and from each of its peers, and each peer sends and receives
the same bundle in its own batch j. All members go through their batches in order, so they cannot deadlock. Work that is
queued on a device has no timeout, and its failure does not tell which member is missing. Before the first batch, the
members of each pair therefore notify each other over the host that they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ds_dynatrain.plan import Exchange
from ds_dynatrain.transfer.regions import Buffers, MoveRegions, Regions
from ds_dynatrain.transfer.stream import MessageOutline, Parcel
from ds_dynatrain.transfer.transport import Handle, Transport

BUNDLE_BYTES = 64 * 1024 * 1024
"""Maximum number of bytes that one member sends to another in a batch; large enough to make the overhead of a batch
negligible."""
READY = 4
"""Tag of the message with which a member announces that it is ready for its batches."""

Message = tuple[torch.Tensor, int]
"""Bytes on the device (uint8, 1-D, contiguous), and the member that sends or receives them."""


class DeviceLink(Protocol):
    """A communication library that sends messages directly between devices."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Queue a group of messages that start together. They run after all work that this thread has queued
        earlier."""

    def run(self, work: Callable[[], None], deadline: float, what: str, members: Sequence[int]) -> None:
        """Call `work`, which queues messages, and wait until the device has completed them all.

        deadline: a `time.monotonic()` value.

        Raises MemberMissing, naming `members`, when the deadline passes, and TransferError if a message failed or the
        link was closed. After an error the link is unusable and has no message in flight.
        """


@dataclass(frozen=True)
class Batching:
    """The settings that decide which moves are sent in batches between accelerators. All fields except `members` are
    equal on all members.

    members: the peers with which this member exchanges batches; both members of a pair list each other.
    kinds: the state kinds that are on accelerators both before and after the switch.
    most_peers: the largest number of peers that any member has.
    budget_bytes: limit on staging memory.
    """

    members: frozenset[int]
    kinds: frozenset[str]
    most_peers: int
    budget_bytes: int

    @property
    def bundle_bytes(self) -> int:
        """Maximum number of bytes that one member sends to another in a batch, chosen so that staging memory stays
        within the budget."""
        return max(1, min(BUNDLE_BYTES, self.budget_bytes // (2 * max(1, self.most_peers))))


@dataclass(frozen=True)
class Bundles:
    """The messages that this member exchanges with one peer, grouped into batches.

    peer: the other member.
    sends: the messages to the peer, before grouping.
    receives: the messages from the peer, before grouping.
    outgoing: the messages to the peer in each batch.
    incoming: the messages from the peer in each batch.
    """

    peer: int
    sends: MessageOutline
    receives: MessageOutline
    outgoing: tuple[tuple[Parcel, ...], ...]
    incoming: tuple[tuple[Parcel, ...], ...]

    @staticmethod
    def of(exchange: Exchange, most: int) -> Bundles:
        """Divide an exchange into batches with at most `most` bytes in each direction. Both members get the same
        batches."""
        sends = MessageOutline.of(MoveRegions.of(exchange.sends, "source"), most, most)
        receives = MessageOutline.of(MoveRegions.of(exchange.receives, "target"), most, most)
        return Bundles(exchange.peer, sends, receives, bundled(sends.parcels, most), bundled(receives.parcels, most))

    def batch(self, number: int) -> tuple[tuple[Parcel, ...], tuple[Parcel, ...]]:
        """Return the outgoing and the incoming messages of a batch. One of the two may be empty, because the two
        directions can have different numbers of bundles."""
        out, into = self.outgoing, self.incoming
        return out[number] if number < len(out) else (), into[number] if number < len(into) else ()

    def staged(self, number: int) -> int:
        """Return the number of bytes of staging memory that the packed messages of a batch need."""
        return sum(parcel.nbytes for parcels in self.batch(number) for parcel in parcels if parcel.is_packed)


@dataclass(frozen=True)
class Batches:
    """The batches that one member exchanges with its peers.

    exchanges: the messages with each peer, grouped into batches.
    count: the number of batches.
    staging_bytes: the device memory that the packed messages of a batch need at most.
    """

    exchanges: tuple[Bundles, ...] = ()
    count: int = 0
    staging_bytes: int = 0

    @staticmethod
    def of(exchanges: Iterable[Bundles]) -> Batches:
        """Combine the messages exchanged with each peer into common batches, and compute the number of batches and the
        staging memory that they need."""
        found = tuple(exchanges)
        count = max((max(len(each.outgoing), len(each.incoming)) for each in found), default=0)
        staged = (sum(each.staged(number) for each in found) for number in range(count))
        return Batches(found, count, max(staged, default=0))


def bundled(parcels: Sequence[Parcel], most: int) -> tuple[tuple[Parcel, ...], ...]:
    """Group messages, in order, into bundles of at most `most` bytes. A single message must not be longer than
    `most`."""
    found, room = list[list[Parcel]](), 0
    for parcel in parcels:
        if parcel.nbytes > room or not found:
            found.append([])
            room = most
        found[-1].append(parcel)
        room -= parcel.nbytes
    return tuple(tuple(bundle) for bundle in found)


@dataclass
class BatchedMoves:
    """The execution of a member's batches of messages between accelerators. The member has at least one peer.

    source: the member's buffers before the switch.
    target: the member's buffers after the switch.
    transport: the transport over which members tell each other that they are ready.
    link: the library that sends the messages.
    lent: the regions from which the member sends.
    into: the regions into which the member receives.
    """

    batches: Batches
    source: Buffers
    target: Buffers
    transport: Transport
    link: DeviceLink
    lent: list[Regions] = field(init=False)
    into: list[Regions] = field(init=False)
    _hellos: list[Handle] = field(default_factory=list)
    _room: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.lent = [each.sends.places.among(self.source) for each in self.batches.exchanges]
        self.into = [each.receives.places.among(self.target) for each in self.batches.exchanges]

    def start(self) -> None:
        """Notify each peer that this member is ready, and begin to receive each peer's own notification."""
        for each in self.batches.exchanges:
            for begin in (self.transport.send, self.transport.receive):
                self._hellos.append(begin(torch.zeros(1, dtype=torch.uint8), each.peer, READY))

    def run(self, deadline: float) -> None:
        """Wait until all peers are ready, and run all batches. Raises the errors of `Handle.wait` and of the link."""
        for hello in self._hellos:
            hello.wait(deadline)
        peers = [each.peer for each in self.batches.exchanges]
        self.link.run(self._queue, deadline, f"{self.batches.count} batches between devices", peers)

    def _queue(self) -> None:
        device = next(data.device for regions in (*self.lent, *self.into) for data in regions.data)
        self._room = torch.empty(self.batches.staging_bytes, dtype=torch.uint8, device=device)
        for number in range(self.batches.count):
            self._exchange(number)

    def _exchange(self, number: int) -> None:
        """Queue one batch. The device runs batches in order, so all batches can use the same staging memory."""
        sends, receives, landing, at = list[Message](), list[Message](), [], 0
        for each, lent, into in zip(self.batches.exchanges, self.lent, self.into, strict=True):
            outgoing, incoming = each.batch(number)
            for parcel in outgoing:
                data, at = self._memory(parcel, lent, at)
                if parcel.is_packed:
                    lent.pack(parcel.matrices, data)
                sends.append((data, each.peer))
            for parcel in incoming:
                data, at = self._memory(parcel, into, at)
                receives.append((data, each.peer))
                if parcel.is_packed:
                    landing.append((into, parcel, data))
        self.link.exchange(sends, receives)
        for regions, parcel, data in landing:
            regions.unpack(parcel.matrices, data)

    def _memory(self, parcel: Parcel, regions: Regions, at: int) -> tuple[torch.Tensor, int]:
        """Return the memory of a message, and the next free offset in the staging memory.

        A packed message lies in the staging memory from offset `at` on, any other message in its buffer.
        """
        if not parcel.is_packed or self._room is None:
            return regions.view(parcel.matrices[0]), at
        return self._room[at : at + parcel.nbytes], at + parcel.nbytes
