"""Moves by the accelerators' library of collectives: messages between devices, in batches that start all at once.

Batch j of a member has the j-th bundle of messages to and from each of its peers; it is batch j for these peers, too.
All members go through their batches in order, so no circle of waiting members can arise. Work that is queued on a
device has no time limit and does not say who is missing. So, before the first batch, the members of each pair tell each
other over the host that they have come this far.
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
"""Most bytes that one member sends another in a batch: enough that starting a batch costs next to nothing."""
READY = 4
"""Tag of the message that says a member has come to its batches."""

Message = tuple[torch.Tensor, int]
"""Bytes on the device (uint8, 1-D, contiguous), and the member that they go to or come from."""


class DeviceLink(Protocol):
    """A library that sends messages between devices."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Queue messages that start all at once, in the order of this thread's queue."""

    def run(self, work: Callable[[], None], deadline: float, what: str, members: Sequence[int]) -> None:
        """Call `work`, which queues messages, and wait until the device has done them all.

        deadline: a `time.monotonic()` value. After an error the link is of no use, and none of its messages are under
        way. Raises MemberMissing, naming `members`, when the deadline passes, and TransferError if a message failed or
        the link was ended meanwhile.
        """


@dataclass(frozen=True)
class Batching:
    """Choice of the moves that go in batches. It is equal on all members, except for `members`: both ends of a pair
    list each other.

    kinds: the state kinds that are on accelerators, before the switch and after it. most_peers: largest number of peers
    of any member.
    """

    members: frozenset[int]
    kinds: frozenset[str]
    most_peers: int
    budget_bytes: int

    @property
    def bundle_bytes(self) -> int:
        """Most bytes that one member sends another in a batch, chosen so that staging stays within the budget."""
        return max(1, min(BUNDLE_BYTES, self.budget_bytes // (2 * max(1, self.most_peers))))


@dataclass(frozen=True)
class Bundles:
    """Batches with one peer: `outgoing` and `incoming` list the messages of each batch."""

    peer: int
    sends: MessageOutline
    receives: MessageOutline
    outgoing: tuple[tuple[Parcel, ...], ...]
    incoming: tuple[tuple[Parcel, ...], ...]

    @staticmethod
    def of(exchange: Exchange, most: int) -> Bundles:
        """Cut an exchange into bundles of at most `most` bytes, alike at both ends."""
        sends = MessageOutline.of(MoveRegions.of(exchange.sends, "source"), most, most)
        receives = MessageOutline.of(MoveRegions.of(exchange.receives, "target"), most, most)
        return Bundles(exchange.peer, sends, receives, bundled(sends.parcels, most), bundled(receives.parcels, most))

    def batch(self, number: int) -> tuple[tuple[Parcel, ...], tuple[Parcel, ...]]:
        """Return the outgoing and the incoming messages of a batch; either side may run out of messages before the
        other.
        """
        out, into = self.outgoing, self.incoming
        return out[number] if number < len(out) else (), into[number] if number < len(into) else ()

    def staged(self, number: int) -> int:
        """Return the staging bytes that the packed messages of a batch need."""
        return sum(parcel.nbytes for parcels in self.batch(number) for parcel in parcels if parcel.is_packed)


@dataclass(frozen=True)
class Batches:
    """The batches of a member, of which there are `count`.

    staging_bytes: device memory for packed messages.
    """

    exchanges: tuple[Bundles, ...] = ()
    count: int = 0
    staging_bytes: int = 0

    @staticmethod
    def of(exchanges: Iterable[Bundles]) -> Batches:
        """Make the batches of all peers, and compute their number and their staging before any byte is touched."""
        found = tuple(exchanges)
        count = max((max(len(each.outgoing), len(each.incoming)) for each in found), default=0)
        staged = (sum(each.staged(number) for each in found) for number in range(count))
        return Batches(found, count, max(staged, default=0))


def bundled(parcels: Sequence[Parcel], most: int) -> tuple[tuple[Parcel, ...], ...]:
    """Group messages, in order, into bundles of at most `most` bytes; no message may be longer than that."""
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
    """This member's side of all its batches, with one peer at least.

    lent, into: the regions that it sends from, and those that it receives into.
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
        """Tell each peer that this member has arrived, and begin to listen for theirs."""
        for each in self.batches.exchanges:
            for begin in (self.transport.send, self.transport.receive):
                self._hellos.append(begin(torch.zeros(1, dtype=torch.uint8), each.peer, READY))

    def run(self, deadline: float) -> None:
        """Wait for each peer, and run all batches. Raises as `Handle` and `DeviceLink.run` do."""
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
        """Queue one batch; by the order of the queue, the staging of the batch before is free by then."""
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
        """Return the memory of a message, in its buffer or in the staging from `at` on, and where the next one may
        begin.
        """
        if not parcel.is_packed or self._room is None:
            return regions.view(parcel.matrices[0]), at
        return self._room[at : at + parcel.nbytes], at + parcel.nbytes
