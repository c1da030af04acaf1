"""Neighbors: members on one machine that read each other's memory, if the kernel permits this.

Linux's process_vm_readv transfers bytes with a single copy and no message. The kernel permits a process to read the
memory of another one that it may debug: any process of the same user or, where Yama (a Linux security module) restricts
debugging to descendants, only the processes that `permit_readers` admits. The shared-memory transports of MPI libraries
work in the same way.

A sender offers a message in a small packet over a Unix socket. The receiver reads the bytes from the sender's memory
and confirms when it has read all of them. Messages are matched by tag and by a number counted from 0. A neighbor is not
trusted to be correct: lengths are checked, and the digests that are compared in a switch also cover the values that
were read, just as they cover values received over a network.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer.device_memory import MemoryProbe
from ds_dynatrain.transfer.transport import Handle, Transport, bytes_of

MOST_BYTES = 1 << 30
"""Maximum number of bytes per read. One system call transfers at most 2^31 - 1."""
PR_SET_PTRACER = 0x59616D61
ANYBODY, NOBODY = -1, 0
"""Values that permit all processes of the same user, or none, to read. From <linux/prctl.h>."""
SEND, RECEIVE = "send", "receive"
OFFER, TAKEN = 1, 2
"""Kinds of packets: OFFER says that the sender offers a message, TAKEN that the receiver has read all of it."""
PACKET = struct.Struct("<BxxxIQQQ")
"""Format of a packet: its kind, the tag and number of the message, and the address and length in bytes of an offer."""
Key = tuple[int, int]
"""Tag and number of a message."""
Share = Callable[[str, Any], Mapping[int, Any]]
"""Function `share(what, record)` that sends a record (plain JSON) to all members and returns all records by member."""

PEER = struct.Struct("=iII")
"""Format of C structure `ucred`: the IDs of process, user and group."""
PROBE_BYTES = 16
BACKLOG = 4096
STOP_SECONDS = 0.05
"""Longest time, in seconds, between two calls of `stop` while waiting."""


class _Region(ctypes.Structure):
    """C structure `struct iovec`: address and length of a range of bytes."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def machine() -> str:
    """Return a name that is the same in all processes that might be able to read each other's memory.

    Such processes run under the same boot of the kernel, in the same process and network namespaces. Returns "" if the
    system does not support reading the memory of other processes.
    """
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def permit_readers(who: int = ANYBODY) -> None:
    """Let other processes of this user read this process's memory even where Yama (a Linux security module) would
    forbid it. Failures are ignored.

    who: `ANYBODY`, or `NOBODY` to revoke the permission. `Neighbors.close` revokes it for the whole process, so call
        this again afterwards if it is still needed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(who & (1 << 64) - 1), 0, 0, 0)


def read_memory(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous uint8 tensor in host memory with bytes of another process.

    process: the ID of the process.
    address: the address of the first byte in that process.

    Raises TransferError if the kernel does not permit it, or if there is no such process or memory.
    """
    library, done, length = ctypes.CDLL(None, use_errno=True), 0, into.numel()
    library.process_vm_readv.restype = ctypes.c_ssize_t
    while done < length:
        part = min(length - done, MOST_BYTES)
        here, there = _Region(into.data_ptr() + done, part), _Region(address + done, part)
        count = library.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            why = os.strerror(ctypes.get_errno()) if count else "nothing was read"
            raise TransferError(f"cannot read {length - done} bytes of process {process}: {why}")
        done += count


@dataclass(eq=False)
class NeighborMessage:
    """A message to or from a neighbor (a member on the same machine).

    line: the connection to the neighbor.
    what: "send" or "receive".
    data: the bytes to send, or the memory to fill.
    host: the memory that is read or filled: `data` itself, or host memory if `data` is on an accelerator.
    is_done: whether all bytes have been read by the receiver.
    """

    neighbors: Neighbors
    line: NeighborLine
    what: str
    data: torch.Tensor
    host: torch.Tensor
    is_done: bool = False
    since: float = field(default_factory=time.monotonic)

    def wait(self, deadline: float) -> None:
        self.line.settle()
        while not self.is_done:
            self.neighbors.advance(self.line, f"{self.what} of {self.host.numel()} bytes", self.since, deadline)
        if self.host is not self.data:
            self.data.copy_(self.host)


@dataclass
class NeighborLine:
    """The connection to one neighbor (a member on the same machine).

    member: the neighbor's member number.
    process: the ID of the neighbor's process.
    outbox: packets that could not be sent yet.
    numbers: the number of messages begun so far, keyed by (direction, tag).
    offers: messages that the neighbor offers and this member has not read yet: a map from key to (address, length).
    sent: messages to the neighbor that it has not read yet.
    wanted: messages awaited from the neighbor.
    is_over: whether the neighbor has closed the connection.
    """

    member: int
    process: int
    socket: socket.socket
    outbox: deque[bytes] = field(default_factory=deque)
    numbers: Counter[tuple[str, int]] = field(default_factory=Counter)
    offers: dict[Key, tuple[int, int]] = field(default_factory=dict)
    sent: dict[Key, NeighborMessage] = field(default_factory=dict)
    wanted: dict[Key, NeighborMessage] = field(default_factory=dict)
    is_over: bool = False

    def begin(self, message: NeighborMessage, tag: int) -> NeighborMessage:
        """Offer a message to the neighbor, or begin to wait for the neighbor's next message with the given tag."""
        if not message.host.numel():
            message.is_done = True
            return message
        key = tag, self.numbers[message.what, tag]
        self.numbers[message.what, tag] += 1
        if message.what == SEND:
            self.sent[key] = message
            self._say(OFFER, key, message.host.data_ptr(), message.host.numel())
        else:
            self.wanted[key] = message
        return message

    def flush(self) -> None:
        """Send queued packets until the socket would block; drop them if the connection has failed."""
        try:
            while self.outbox:
                self.socket.send(self.outbox[0])
                self.outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()

    def listen(self) -> None:
        """Process all packets that have arrived; set `is_over` if the neighbor has closed the connection."""
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
        """Read all messages that the neighbor offers and that this member awaits, in the order of the offers.

        Raises TransferError if an offered message has another length than the awaited one, or if the neighbor's memory
        can no longer be read.
        """
        for key in [key for key in self.offers if key in self.wanted]:
            (address, length), message = self.offers.pop(key), self.wanted.pop(key)
            if length != (awaited := message.host.numel()):
                raise TransferError(f"member {self.member} offers {length} bytes where {awaited} are awaited")
            try:
                read_memory(self.process, address, message.host)
            except TransferError as error:
                raise TransferError(f"receive of {length} bytes with member {self.member} failed: {error}") from error
            message.is_done = True
            self._say(TAKEN, key)

    def close(self) -> None:
        """Drop queued packets and close the socket, which also wakes any thread that waits for the socket."""
        self.outbox.clear()
        with suppress(OSError):  # wakes a thread that waits for it
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _say(self, kind: int, key: Key, address: int = 0, length: int = 0) -> None:
        """Queue a packet, and send it now unless the socket would block."""
        self.outbox.append(PACKET.pack(kind, *key, address, length))
        self.flush()

    def _hear(self, packet: bytes) -> None:
        kind, tag, number, address, length = PACKET.unpack(packet)
        if kind == OFFER:
            self.offers[tag, number] = (address, length)
        elif kind == TAKEN and (tag, number) in self.sent:
            self.sent.pop((tag, number)).is_done = True


@dataclass(eq=False)
class Neighbors:
    """The neighbors of a member: those on the same machine, where each of the two can read the other's memory.

    Build it with `meet`, and `close` it after use.

    lines: the connection to each neighbor.
    lenders: the neighbors with which this member shares accelerator memory: each can read the other's.
    """

    lines: Mapping[int, NeighborLine]
    lenders: frozenset[int] = frozenset()
    _poll: select.poll = field(default_factory=select.poll)
    _by_descriptor: dict[int, NeighborLine] = field(default_factory=dict)

    @classmethod
    def meet(
        cls,
        member: int,
        share: Share,
        seconds: float,
        stop: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> Neighbors:
        """Find and connect to this member's neighbors. All members must call it.

        member: this member's number.
        share: sends a record to all members, and returns the records of all members.
        seconds: time limit for connecting.
        stop: called while waiting for other members; it may raise an error to end the wait.
        device: this member's accelerator, if any.

        Raises MemberMissing if a neighbor does not connect within `seconds`, and any error of `share`.
        """
        deadline = time.monotonic() + seconds
        probe = torch.tensor(list(os.urandom(PROBE_BYTES)), dtype=torch.uint8)  # not drawn from training
        permit_readers()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # Linux chooses an abstract name, without a file
            listener.listen(BACKLOG)
            name = listener.getsockname().hex()
            here = {"machine": machine(), "process": os.getpid(), "socket": name}
            lent = MemoryProbe(device)
            cards = share("cards", {**here, "probe": [probe.data_ptr(), probe.tolist()], "device": lent.record})
            able, lending = list[int](), list[int]()
            for other, card in sorted(cards.items()):
                if other != member and _can_read(card, here):
                    able.append(other)
                    if lent.can_read(card["device"]):
                        lending.append(other)
            near, lenders, missing = list[int](), set[int](), dict[int, int]()
            for other, (reads, borrows) in share("readable", [able, lending]).items():  # both sides agree on `near`
                if member in reads and other in able:
                    near.append(other)
                    if member in borrows and other in lending:
                        lenders.add(other)
            lines: dict[int, NeighborLine] = {}
            try:
                for other in sorted(near):
                    if other > member:
                        lines[other] = NeighborLine(other, *_call(other, cards[other], deadline))
                    else:
                        missing[int(cards[other]["process"])] = other
                while missing:
                    process, link = _answer(listener, missing, deadline, stop)
                    other = missing.pop(process)
                    lines[other] = NeighborLine(other, process, link)
            except BaseException:
                for line in lines.values():
                    line.close()
                raise
        return cls(lines, frozenset(lenders))

    @property
    def members(self) -> frozenset[int]:
        """Member numbers of the neighbors."""
        return frozenset(self.lines)

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Offer a tensor's bytes to a neighbor. Bytes on an accelerator are copied to host memory first."""
        line, data = self._line(member), bytes_of(tensor).to("cpu")
        return line.begin(NeighborMessage(self, line, SEND, data, data), tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Begin to receive a neighbor's next message with the given tag into a tensor."""
        line, data = self._line(member), bytes_of(tensor)
        host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=torch.uint8)
        return line.begin(NeighborMessage(self, line, RECEIVE, data, host), tag)

    def advance(self, line: NeighborLine, what: str, since: float, deadline: float) -> None:
        """Wait for packets from any neighbor, and process them.

        line: the connection whose message is awaited.
        what: a description of that message, for errors.
        since: when the wait began.

        Raises MemberMissing when the deadline passes, and TransferError if the neighbor of `line` has disconnected.
        """
        if line.is_over:
            raise TransferError(f"{what} with member {line.member} failed: its connection has ended")
        for each in self.lines.values():
            if not each.is_over:
                self._by_descriptor[each.socket.fileno()] = each
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
        """Close all connections, and revoke the permission to read this process's memory."""
        for line in self.lines.values():
            line.close()
        self.lines = {}
        permit_readers(NOBODY)

    def _line(self, member: int) -> NeighborLine:
        if member not in self.lines:
            raise TransferError(f"member {member} is no neighbor; there are {sorted(self.lines)}")
        return self.lines[member]


@dataclass(frozen=True)
class RoutedTransport:
    """A transport that reaches members on the same machine (`near`) through their memory, and all other members through
    `far`."""

    near: Neighbors
    far: Transport

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self._transport_of(member).send(tensor, member, tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self._transport_of(member).receive(tensor, member, tag)

    def _transport_of(self, member: int) -> Transport:
        return self.near if member in self.near.members else self.far


def _can_read(card: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether a member is on this machine and its memory can be read. This is tested by reading a few bytes
    whose values the member has announced.

    card: the record that the member has shared.
    here: this member's own record.
    """
    if not here["machine"] or card["machine"] != here["machine"]:
        return False
    address, expected = card["probe"]
    seen = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    try:
        read_memory(int(card["process"]), int(address), seen)
    except TransferError:
        return False
    return bool(seen.tolist() == expected)


def _call(other: int, card: Mapping[str, Any], deadline: float) -> tuple[int, socket.socket]:
    """Connect to a neighbor with a higher number; return its process ID and the socket."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        link.connect(bytes.fromhex(card["socket"]))
        if (process := _process(link)) != int(card["process"]):
            raise TransferError(f"process {process} answers for member {other}, which is process {card['process']}")
        link.setblocking(False)
    except OSError as error:
        link.close()
        raise TransferError(f"cannot connect to member {other} on this machine: {error}") from error
    except TransferError:
        link.close()
        raise
    return int(card["process"]), link


def _answer(
    listener: socket.socket, missing: Mapping[int, int], deadline: float, stop: Callable[[], None]
) -> tuple[int, socket.socket]:
    """Accept the connection of the next neighbor with a lower number; return its process ID and the socket.

    missing: a map from process ID to member number, for the members that have not connected yet. Connections from other
        processes are closed.

    The kernel identifies the connecting process, and nothing is read from the socket, so a silent process cannot block
    this call.
    """
    since = time.monotonic()
    while time.monotonic() < deadline:
        stop()
        listener.settimeout(max(min(deadline - time.monotonic(), STOP_SECONDS), 0.001))
        try:
            link, _ = listener.accept()
        except TimeoutError:
            continue
        process = _process(link)
        if process in missing:
            link.setblocking(False)
            return process, link
        link.close()
    raise MemberMissing("connecting on this machine", sorted(missing.values()), time.monotonic() - since)


def _process(link: socket.socket) -> int:
    """Return the ID of the process at the other end of a socket, as reported by the kernel."""
    return int(PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0])
