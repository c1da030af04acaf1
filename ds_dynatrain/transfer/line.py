"""The connection between two members on one machine: small packets over a Unix socket, and who has taken what.

A sender offers a message. The receiver reads it from the sender's memory, one copy, and says when it has taken all of
it. Messages are matched by tag and number, counted from 0.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.cross_memory import read_memory

OFFER, TAKEN = 1, 2
"""A message is there; all of it has been taken."""
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
    outbox: deque[bytes] = field(default_factory=deque)
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
        self._say(OFFER, key, data.data_ptr(), data.numel())
        return key

    def want(self, tag: int, into: torch.Tensor) -> Key:
        """Await the neighbor's next message of a tag."""
        key = tag, self.asked.get(tag, 0)
        self.asked[tag] = key[1] + 1
        self.wanted[key] = into
        return key

    def flush(self) -> None:
        """Send what the socket takes now; what a neighbor that has gone had said before still counts."""
        try:
            while self.outbox:
                self.socket.send(self.outbox[0])
                self.outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()

    def listen(self) -> None:
        """Take in what has come, and whether the neighbor has gone."""
        try:
            while True:
                packet = self.socket.recv(PACKET.size)
                if len(packet) != PACKET.size:
                    self.is_over = True
                    return
                self._hear(packet)
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True

    def settle(self) -> None:
        """Read whatever is both offered and wanted, in the order of the offers.

        TransferError where the lengths differ, or the neighbor's memory cannot be read any more.
        """
        for key in [key for key in self.offers if key in self.wanted]:
            (address, length), into = self.offers.pop(key), self.wanted.pop(key)
            if length != into.numel():
                raise TransferError(f"member {self.member} offers {length} bytes where {into.numel()} are awaited")
            try:
                read_memory(self.process, address, into)
            except TransferError as error:
                raise TransferError(f"receive of {length} bytes with member {self.member} failed: {error}") from error
            self.arrived.add(key)
            self._say(TAKEN, key)

    def close(self) -> None:
        """End the connection."""
        self.outbox.clear()
        with suppress(OSError):  # whoever waits for it in another thread wakes up
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _say(self, kind: int, key: Key, address: int = 0, length: int = 0) -> None:
        """Send a packet as soon as the socket takes it."""
        self.outbox.append(PACKET.pack(kind, *key, address, length))
        self.flush()

    def _hear(self, packet: bytes) -> None:
        kind, tag, number, address, length = PACKET.unpack(packet)
        if kind == OFFER:
            self.offers[tag, number] = (address, length)
        elif kind == TAKEN:
            self.taken.add((tag, number))
