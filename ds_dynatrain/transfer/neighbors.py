"""Members on one machine read each other's memory: a transport with one copy, where the kernel permits it.

A sender offers an address and a length over a Unix socket; the receiver reads from there into its tensor and says that
it has taken it. Nothing that a peer says is trusted beyond that: lengths must be those expected, and what was read is
proved by the certificate of the switch as if it had come over a wire.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer.cross_memory import NOBODY, machine, permit_readers, read_memory
from ds_dynatrain.transfer.transport import Handle, Transport, bytes_of

Share = Callable[[str, Any], Mapping[int, Any]]
"""`share(what, record)`: tell all members this one's record (plain JSON), and return all of theirs by member."""

OFFER, TAKEN = 1, 2
PACKET = struct.Struct("<BxxxIQQQ")
"""What it is; the tag and the number of the message; of an offer, the address and the length in bytes."""
PEER = struct.Struct("=iII")
"""`struct ucred`: process, user, group."""
HELLO = struct.Struct("<Q")
PROBE_BYTES = 16
BACKLOG = 4096
STOP_SECONDS = 0.05
"""Between two looks for a reason to give up."""


@dataclass
class _Line:
    """The connection to one neighbor. Messages are counted by tag, from 0."""

    member: int
    process: int
    socket: socket.socket
    outbox: deque[bytes] = field(default_factory=deque)
    sent: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    offers: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    wanted: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)
    """Messages of ours that the neighbor has, until their senders have asked."""
    arrived: set[tuple[int, int]] = field(default_factory=set)
    is_over: bool = False

    def say(self, kind: int, key: tuple[int, int], address: int = 0, length: int = 0) -> None:
        """Send a packet as soon as the socket takes it."""
        self.outbox.append(PACKET.pack(kind, *key, address, length))
        self.flush()

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
                kind, tag, number, address, length = PACKET.unpack(packet)
                if kind == OFFER:
                    self.offers[tag, number] = (address, length)
                else:
                    self.taken.add((tag, number))
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True

    def settle(self) -> None:
        """Read whatever is both offered and wanted."""
        for key in self.offers.keys() & self.wanted.keys():
            (address, length), into = self.offers.pop(key), self.wanted.pop(key)
            if length != into.numel():
                raise TransferError(f"member {self.member} offers {length} bytes where {into.numel()} are awaited")
            read_memory(self.process, address, into)
            self.arrived.add(key)
            self.say(TAKEN, key)


class Neighbors:
    """The members on this machine that can read this one, and that it can read. Built by `meet`; `close` it."""

    def __init__(self, lines: Mapping[int, _Line]) -> None:
        self._lines = lines
        self._poll = select.poll()
        self._by_descriptor = {line.socket.fileno(): line for line in lines.values()}

    @classmethod
    def meet(cls, member: int, share: Share, seconds: float, stop: Callable[[], None] = lambda: None) -> Neighbors:
        """Find this member's neighbors. All members call it; each finds those of the same machine only.

        stop: called while waiting for others; it may raise. MemberMissing for a neighbor that does not connect in
        `seconds`, or whatever `share` raises.
        """
        deadline, probe = time.monotonic() + seconds, torch.randint(0, 256, (PROBE_BYTES,), dtype=torch.uint8)
        permit_readers()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # Linux finds a name that is no file's
            listener.listen(BACKLOG)
            name = listener.getsockname().hex()
            here = {"machine": machine(), "process": os.getpid(), "socket": name}
            cards = share("cards", {**here, "probe": [probe.data_ptr(), probe.tolist()]})
            able = {other for other, card in cards.items() if other != member and _can_read(card, here["machine"])}
            found = share("readable", sorted(able))
            near = sorted(other for other in able if member in found[other])
            lines: dict[int, _Line] = {}
            try:
                for other in [each for each in near if each > member]:
                    lines[other] = _call(member, other, cards[other], deadline)
                while len(lines) < len(near):
                    line = _answer(listener, cards, set(near) - set(lines), deadline, stop)
                    lines[line.member] = line
            except BaseException:
                for line in lines.values():
                    line.socket.close()
                raise
        return cls(lines)

    @property
    def members(self) -> frozenset[int]:
        """Who they are."""
        return frozenset(self._lines)

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Offer the tensor's bytes; an accelerator's are copied to the host first."""
        line, data = self._line(member), bytes_of(tensor).to("cpu")
        if not data.numel():
            return _Done()
        key = tag, line.sent.get(tag, 0)
        line.sent[tag] = key[1] + 1
        line.say(OFFER, key, data.data_ptr(), data.numel())
        return _Sent(self, line, key, data)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Ask for the next message of that tag."""
        line, data = self._line(member), bytes_of(tensor)
        if not data.numel():
            return _Done()
        key = tag, line.asked.get(tag, 0)
        line.asked[tag] = key[1] + 1
        host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=torch.uint8)
        line.wanted[key] = host
        return _Received(self, line, key, data, host)

    def advance(self, line: _Line, what: str, since: float, deadline: float) -> None:
        """Wait until something comes from any neighbor, and do what is due.

        MemberMissing when the deadline passes, TransferError if the neighbor of the line has gone.
        """
        if line.is_over:
            raise TransferError(f"{what} with member {line.member} failed: its connection has ended")
        for each in self._lines.values():
            if not each.is_over:
                self._poll.register(each.socket, select.POLLIN | (select.POLLOUT if each.outbox else 0))
        left = max(deadline - time.monotonic(), 0.0)
        ready = self._poll.poll(1e3 * left)
        if not ready and time.monotonic() >= deadline:
            raise MemberMissing(what, [line.member], time.monotonic() - since)
        for descriptor, _ in ready:
            found = self._by_descriptor[descriptor]
            found.flush()
            found.listen()
            found.settle()
            if found.is_over:
                self._poll.unregister(descriptor)

    def close(self) -> None:
        """End all connections, and let nobody read any more."""
        for line in self._lines.values():
            line.socket.close()
        self._lines = {}
        permit_readers(NOBODY)

    def _line(self, member: int) -> _Line:
        if member not in self._lines:
            raise TransferError(f"member {member} is no neighbor; there are {sorted(self._lines)}")
        return self._lines[member]


class RoutedTransport:
    """Neighbors by reading memory, everybody else over the group."""

    def __init__(self, near: Neighbors, far: Transport) -> None:
        self._near, self._far = near, far

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """See `Transport`."""
        return self._to(member).send(tensor, member, tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """See `Transport`."""
        return self._to(member).receive(tensor, member, tag)

    def _to(self, member: int) -> Transport:
        return self._near if member in self._near.members else self._far


class _Done:
    def wait(self, deadline: float) -> None:
        """An empty message."""


@dataclass
class _Sent:
    neighbors: Neighbors
    line: _Line
    key: tuple[int, int]
    data: torch.Tensor
    since: float = field(default_factory=time.monotonic)

    def wait(self, deadline: float) -> None:
        what = f"send of {self.data.numel()} bytes"
        while self.key not in self.line.taken:
            self.neighbors.advance(self.line, what, self.since, deadline)
        self.line.taken.remove(self.key)


@dataclass
class _Received:
    neighbors: Neighbors
    line: _Line
    key: tuple[int, int]
    data: torch.Tensor
    host: torch.Tensor
    since: float = field(default_factory=time.monotonic)

    def wait(self, deadline: float) -> None:
        what = f"receive of {self.host.numel()} bytes"
        self.line.settle()
        while self.key not in self.line.arrived:
            self.neighbors.advance(self.line, what, self.since, deadline)
        self.line.arrived.remove(self.key)
        if self.host is not self.data:
            self.data.copy_(self.host)


def _can_read(card: Mapping[str, Any], here: str) -> bool:
    """Whether a member is on this machine and the kernel lets this process read it."""
    if not here or card["machine"] != here:
        return False
    address, expected = card["probe"]
    seen = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    try:
        read_memory(int(card["process"]), int(address), seen)
    except TransferError:
        return False
    return bool(seen.tolist() == expected)


def _call(member: int, other: int, card: Mapping[str, Any], deadline: float) -> _Line:
    """Connect to a neighbor with a higher number."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        link.connect(bytes.fromhex(card["socket"]))
        _check(link, other, card)
        link.send(HELLO.pack(member))
        link.setblocking(False)
    except OSError as error:
        link.close()
        raise TransferError(f"cannot connect to member {other} on this machine: {error}") from error
    except TransferError:
        link.close()
        raise
    return _Line(other, int(card["process"]), link)


def _answer(
    listener: socket.socket, cards: Mapping[int, Any], missing: set[int], deadline: float, stop: Callable[[], None]
) -> _Line:
    """The next neighbor with a lower number that connects; anybody else is sent away."""
    since = time.monotonic()
    while True:
        try:
            listener.settimeout(max(min(deadline - time.monotonic(), STOP_SECONDS), 0.001))
            link, _ = listener.accept()
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            (member,) = HELLO.unpack(link.recv(HELLO.size).ljust(HELLO.size, b"\xff"))
        except TimeoutError:
            stop()
            if time.monotonic() < deadline:
                continue
            raise MemberMissing("connecting on this machine", sorted(missing), time.monotonic() - since) from None
        try:
            if member in missing:
                _check(link, member, cards[member])
                link.setblocking(False)
                return _Line(member, int(cards[member]["process"]), link)
        except TransferError:
            pass
        link.close()


def _check(link: socket.socket, member: int, card: Mapping[str, Any]) -> None:
    """TransferError if the other end is not the process that the member said it is."""
    process = PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0]
    if process != card["process"]:
        raise TransferError(f"process {process} answers for member {member}, which is process {card['process']}")
