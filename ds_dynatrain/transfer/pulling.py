"""Pulls: moves in which the receiver reads the sender's buffers directly from the sender's accelerator memory.

Both members know from the plan which buffers are read. Over the ordinary transport, the sender tells the receiver where
the buffers are, and the receiver confirms that it has read them. The plan also determines the lengths of these
messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.plan import Exchange
from ds_dynatrain.transfer.device_memory import HANDLE_BYTES, DeviceMemory
from ds_dynatrain.transfer.regions import Buffers, Key, MoveRegions, Regions, pairs
from ds_dynatrain.transfer.series import Matrix
from ds_dynatrain.transfer.transport import Handle, Transport

WHERE, DONE = 2, 3
"""Tags of the message with the locations of buffers, and of the message that confirms the end of reading."""
RECORD = struct.Struct(f"={HANDLE_BYTES}sqq")
"""Format of a buffer's location: the handle of its allocation, its offset in it, and its length in bytes."""


@dataclass(frozen=True)
class Sharing:
    """The settings that decide which moves are pulls (reads of another member's accelerator memory). Both members of
    each pair must have the same settings.

    memory: access to other processes' accelerator memory.
    members: the members with which this member shares memory, in both directions.
    kinds: the state kinds whose source buffers are on accelerators on every member.
    after: the state kinds whose target buffers, from which relays read, are on accelerators on every member.
    """

    memory: DeviceMemory
    members: frozenset[int]
    kinds: frozenset[str]
    after: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pull:
    """The reads of accelerator memory between this member and a peer, in both directions.

    peer: the other member.
    lent: regions of this member that the peer reads.
    theirs: regions of the peer that this member reads.
    mine: regions of this member that are filled with the bytes read from `theirs`.
    copies: the regions of `theirs` and `mine` as pairs of matrices (read, written).
    """

    peer: int
    lent: MoveRegions
    theirs: MoveRegions
    mine: MoveRegions
    copies: list[tuple[Matrix, Matrix]]

    @staticmethod
    def of(exchange: Exchange) -> Pull:
        """Replace an exchange of messages by direct reads of accelerator memory."""
        theirs, mine = MoveRegions.of(exchange.receives, "source"), MoveRegions.of(exchange.receives, "target")
        return Pull(exchange.peer, MoveRegions.of(exchange.sends, "source"), theirs, mine, pairs(theirs, mine))


@dataclass
class Pulling:
    """The execution of a member's pulls (reads of other members' accelerator memory).

    memory: access to other processes' accelerator memory.
    pulls: the pulls with each peer.
    source: this member's buffers before the switch.
    target: this member's buffers after the switch.
    transport: the transport for the messages.
    lent: the regions that other members read.
    into: the regions that this member fills.
    """

    memory: DeviceMemory
    pulls: Sequence[Pull]
    source: Buffers
    target: Buffers
    transport: Transport
    lent: list[Regions] = field(init=False)
    into: list[Regions] = field(init=False)
    _places: list[tuple[torch.Tensor, Handle]] = field(default_factory=list)
    _waits: list[Handle] = field(default_factory=list)
    _ends: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lent = [pull.lent.among(self.source) for pull in self.pulls]
        self.into = [pull.mine.among(self.target) for pull in self.pulls]

    def start(self) -> None:
        """Send the locations of this member's buffers to each peer, and begin to receive the locations of the peers'
        buffers."""
        self.memory.synchronize()  # peers do not wait for work queued on this device
        for pull, lent in zip(self.pulls, self.lent, strict=True):
            if lent.data:
                held = dict(zip(pull.lent.keys, lent.data, strict=True))
                records = b"".join(_record(self.memory, key, held[key]) for key in sorted(held))
                said = torch.frombuffer(bytearray(records), dtype=torch.uint8)
                self._waits.append(self.transport.send(said, pull.peer, WHERE))
                self._waits.append(self.transport.receive(self._end(), pull.peer, DONE))
            table = torch.empty(len(pull.theirs.keys) * RECORD.size, dtype=torch.uint8)
            self._places.append((table, self.transport.receive(table, pull.peer, WHERE)))

    def run(self, deadline: float) -> None:
        """Read from all peers, tell each of them when the reading is done, and wait until all peers have read from this
        member.

        Raises TransferError if a peer's buffer is too short, and the errors of `Handle.wait`.
        """
        with ExitStack() as opened:
            begins = dict[bytes, int]()  # address by allocation; each is opened once
            for pull, into, (table, handle) in zip(self.pulls, self.into, self._places, strict=True):
                handle.wait(deadline)
                where = _where(pull, table)
                for allocation, _ in where:
                    if allocation not in begins:
                        begins[allocation] = self.memory.open(allocation)
                        opened.callback(self.memory.close, begins[allocation])
                for theirs, mine in pull.copies:
                    allocation, offset = where[theirs.which]
                    self.memory.read(begins[allocation] + offset, theirs, into.data[mine.which], mine)
            self.memory.synchronize()
        ends = [self.transport.send(self._end(), pull.peer, DONE) for pull in self.pulls if pull.theirs.keys]
        for wait in chain(ends, self._waits):
            wait.wait(deadline)

    def _end(self) -> torch.Tensor:
        self._ends.append(torch.zeros(1, dtype=torch.uint8))
        return self._ends[-1]


def _record(memory: DeviceMemory, key: Key, held: torch.Tensor) -> bytes:
    """Return the location of an accelerator's buffer, packed into bytes for other members.

    Raises TransferError if the buffer is in host memory.
    """
    if held.device.type == "cpu":
        raise TransferError(
            f"{key[0]} in {tuple(key[1])} lies on {held.device}, and others look for it on an accelerator"
        )
    return RECORD.pack(*memory.share(held), held.numel())


def _where(pull: Pull, table: torch.Tensor) -> list[tuple[bytes, int]]:
    """Return the allocation handle and offset of each buffer to read. Raises TransferError if a buffer is too short.

    table: the peer's message with the locations.
    """
    records, where = dict(zip(sorted(pull.theirs.keys), RECORD.iter_unpack(table.numpy().tobytes()), strict=True)), []
    for key, needed in zip(pull.theirs.keys, pull.theirs.reach.tolist(), strict=True):
        handle, offset, length = records[key]
        if needed > length:
            raise TransferError(
                f"member {pull.peer} has {length} bytes of {key[0]} in {tuple(key[1])}, and {needed} are read there"
            )
        where.append((handle, offset))
    return where
