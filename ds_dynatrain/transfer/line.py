"""The connection between two members on one machine: small packets over a Unix socket, and who has taken what.

A sender offers a message; how its bytes then get across is what `ReadingLine` and `ring.RingLine` differ in. The
receiver says when it has taken all of it. Messages are matched by tag and number, counted from 0.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.cross_memory import read_memory

OFFER, TAKEN, RING, SEND, FILLED, FREED = range(1, 7)
"""A message is there; all of it has been taken. The others are those of rings (`ring`)."""
PACKET = struct.Struct("<BxxxIQQQ")
"""What it is; the tag and the number of the message; two numbers, an offer's address and its length in bytes."""
Key = tuple[int, int]
"""Tag and number of a message."""


@dataclass
class Line:
    """One end of the connection to one neighbor."""

    member: int
    process: int
    socket: socket.socket
    outbox: deque[tuple[bytes, int | None]] = field(default_factory=deque)
    sent: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    offers: dict[Key, tuple[int, int]] = field(default_factory=dict)
    wanted: dict[Key, torch.Tensor] = field(default_factory=dict)
    taken: set[Key] = field(default_factory=set)
    """Messages of ours that the neighbor has, until their senders have asked."""
    arrived: set[Key] = field(default_factory=set)
    is_over: bool = False

    def offer(self, tag: int, data: torch.Tensor) -> Key:
        """Let the neighbor have the next message of a tag: contiguous bytes in host memory."""
        key = tag, self.sent.get(tag, 0)
        self.sent[tag] = key[1] + 1
        self.say(OFFER, key, data.data_ptr(), data.numel())
        return key

    def want(self, tag: int, into: torch.Tensor) -> Key:
        """Await the neighbor's next message of a tag."""
        key = tag, self.asked.get(tag, 0)
        self.asked[tag] = key[1] + 1
        self.wanted[key] = into
        return key

    def say(self, kind: int, key: Key, address: int = 0, length: int = 0, descriptor: int | None = None) -> None:
        """Send a packet as soon as the socket takes it; a descriptor goes with it, and is closed here then."""
        self.outbox.append((PACKET.pack(kind, *key, address, length), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; what a neighbor that has gone had said before still counts."""
        try:
            while self.outbox:
                packet, descriptor = self.outbox[0]
                if descriptor is None:
                    self.socket.send(packet)
                else:
                    socket.send_fds(self.socket, [packet], [descriptor])
                    os.close(descriptor)
                self.outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._drop_outbox()

    def listen(self) -> None:
        """Take in what has come, and whether the neighbor has gone."""
        try:
            while True:
                packet, descriptors, _, _ = socket.recv_fds(self.socket, PACKET.size, 1)
                if len(packet) != PACKET.size:
                    self.is_over = True
                    return
                kind, tag, number, address, length = PACKET.unpack(packet)
                self.hear(kind, (tag, number), address, length, descriptors)
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True

    def hear(self, kind: int, key: Key, address: int, length: int, descriptors: list[int]) -> None:
        """One packet; descriptors that came with it belong to this line."""
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == OFFER:
            self.offers[key] = (address, length)
        elif kind == TAKEN:
            self.taken.add(key)

    def settle(self) -> None:
        """Do what is due now, without waiting."""

    def meets(self) -> list[tuple[Key, int, torch.Tensor]]:
        """What is both offered and wanted, in the order of the offers: message, address, place.

        TransferError where the lengths differ.
        """
        found = []
        for key in [key for key in self.offers if key in self.wanted]:
            (address, length), into = self.offers.pop(key), self.wanted.pop(key)
            if length != into.numel():
                raise TransferError(f"member {self.member} offers {length} bytes where {into.numel()} are awaited")
            found.append((key, address, into))
        return found

    def close(self) -> None:
        """End the connection."""
        self._drop_outbox()
        self.socket.close()

    def _drop_outbox(self) -> None:
        for _, descriptor in self.outbox:
            if descriptor is not None:
                os.close(descriptor)
        self.outbox.clear()


class ReadingLine(Line):
    """The receiver reads from the sender's memory: one copy."""

    def settle(self) -> None:
        """Read whatever is both offered and wanted."""
        for key, address, into in self.meets():
            read_memory(self.process, address, into)
            self.arrived.add(key)
            self.say(TAKEN, key)
