"""Moves that the receiver makes by itself: it reads the sender's buffers on an accelerator as if they were its own.

Both sides know from the plan which buffers are read. The sender says where they are, and the receiver says when it is
done with them, in messages of the ordinary transport whose lengths both sides know.
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
from ds_dynatrain.transfer.regions import Buffers, Key, MoveRegions, Regions
from ds_dynatrain.transfer.series import Matrix, pairs
from ds_dynatrain.transfer.transport import Handle, Transport

WHERE, DONE = 2, 3
"""Tags of two messages: the one that says where buffers are, and the one that says they are no longer read."""
RECORD = struct.Struct(f"={HANDLE_BYTES}sqq")
"""Record of one buffer: the handle of its allocation, its offset in that, and its length in bytes."""


@dataclass(frozen=True)
class Sharing:
    """Choice of which members read whose memory. It must be the same on both sides of each pair.

    memory: the means to read it. members: members that read this one's memory, and whose memory this one reads. kinds:
    the state kinds whose source buffers are on accelerators, on every member.
    """

    memory: DeviceMemory
    members: frozenset[int]
    kinds: frozenset[str]


@dataclass(frozen=True)
class Pull:
    """Moves between two members that are made by reading.

    lent: places that the peer reads here. theirs, mine: places that this member reads there, and those that it fills.
    copies: the same two as matrices.
    """

    peer: int
    lent: MoveRegions
    theirs: MoveRegions
    mine: MoveRegions
    copies: list[tuple[Matrix, Matrix]]

    @staticmethod
    def of(exchange: Exchange) -> Pull:
        """Make a pull from the moves of both directions; each is made by its receiver."""
        theirs, mine = MoveRegions.of(exchange.receives, "source"), MoveRegions.of(exchange.receives, "target")
        both = pairs((theirs.which, theirs.begin), (mine.which, mine.begin), theirs.length)
        return Pull(exchange.peer, MoveRegions.of(exchange.sends, "source"), theirs, mine, both)


@dataclass
class Pulling:
    """This member's side of all its pulls.

    lent, into: the regions that others read, and those that this member fills.
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
        """Tell each peer where this member's buffers are, and begin to listen for theirs."""
        self.memory.synchronize()  # others do not wait for what is queued here
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
        """Make all reads, then say so. Raises as a `Handle` does, and TransferError for a buffer that is too short."""
        with ExitStack() as opened:
            begins = dict[bytes, int]()  # of allocations, each of which is opened once
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
    """Return the record by which other members find a buffer."""
    if held.device.type == "cpu":
        raise TransferError(
            f"{key[0]} in {tuple(key[1])} lies on {held.device}, and others look for it on an accelerator"
        )
    return RECORD.pack(*memory.share(held), held.numel())


def _where(pull: Pull, table: torch.Tensor) -> list[tuple[bytes, int]]:
    """Return handle and offset of each buffer to read; TransferError for a buffer that is shorter than the
    reads need.
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
