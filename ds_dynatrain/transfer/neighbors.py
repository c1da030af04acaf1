"""Members on one machine that read each other's memory, where the kernel permits it; else none is found.

Linux's process_vm_readv is one copy and no message. The kernel lets a process do it that might debug the other one: the
same user, and where Yama restricts that to descendants, a process that was given leave by `permit_readers`, as the
shared-memory transports of MPI libraries do.

A sender offers a message over a Unix socket, in small packets. The receiver reads it from the sender's memory and says
when it has taken all of it. Messages are matched by tag and number, counted from 0. Nothing that a peer says is trusted
beyond that: lengths must be those expected, and what was read is proved by the certificate of the switch as if it had
come over a wire.
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
from ds_dynatrain.transfer.device_memory import Probe
from ds_dynatrain.transfer.transport import Handle, Transport, bytes_of

MOST_BYTES = 1 << 30
"""One call moves no more than 2^31 - 1 bytes."""
PR_SET_PTRACER = 0x59616D61
ANYBODY, NOBODY = -1, 0
"""Of the same user. From <linux/prctl.h>."""
SEND, RECEIVE = "send", "receive"
OFFER, TAKEN = 1, 2
"""A message is there; all of it has been taken."""
PACKET = struct.Struct("<BxxxIQQQ")
"""What it is; the tag and the number of the message; two numbers, an offer's address and its length in bytes."""
Key = tuple[int, int]
"""Tag and number of a message."""
Share = Callable[[str, Any], Mapping[int, Any]]
"""`share(what, record)`: tell all members this one's record (plain JSON), and return all of theirs by member."""

PEER = struct.Struct("=iII")
"""`struct ucred`: process, user, group."""
PROBE_BYTES = 16
BACKLOG = 4096
STOP_SECONDS = 0.05
"""Between two looks for a reason to give up."""


class _Region(ctypes.Structure):
    """C structure `struct iovec`: address and length of a run of bytes."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def machine() -> str:
    """Equal in processes of which one may be able to read the other: the same boot, processes and sockets.

    Empty where there is no such call.
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
    """Let other processes of this user read this one's memory where Yama would forbid it; no matter if it cannot."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(who & (1 << 64) - 1), 0, 0, 0)


def read_memory(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous uint8 tensor in host memory with the bytes from `address` on of a process.

    TransferError if the kernel does not permit it, or there is no such process or memory.
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
class Message:
    """Bytes that a neighbor is to read, or room for those that it offers. host: where they are in host memory."""

    neighbors: Neighbors
    line: Line
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
class Line:
    """One end of the connection to one neighbor. offers: addresses and lengths of what has not been read yet."""

    member: int
    process: int
    socket: socket.socket
    outbox: deque[bytes] = field(default_factory=deque)
    numbers: Counter[tuple[str, int]] = field(default_factory=Counter)
    offers: dict[Key, tuple[int, int]] = field(default_factory=dict)
    sent: dict[Key, Message] = field(default_factory=dict)
    wanted: dict[Key, Message] = field(default_factory=dict)
    is_over: bool = False

    def begin(self, message: Message, tag: int) -> Message:
        """Offer the neighbor the next message of a tag, or await its next one."""
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
        """Drop queued messages and close the socket; a thread that waits for it wakes up."""
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
        elif kind == TAKEN and (tag, number) in self.sent:
            self.sent.pop((tag, number)).is_done = True


class Neighbors:
    """The members on this machine that may be read, and may read this one. Built by `meet`; `close` it.

    lenders: those of them for whom that is true of memory on accelerators as well.
    """

    def __init__(self, lines: Mapping[int, Line], lenders: frozenset[int] = frozenset()) -> None:
        self._lines, self.lenders = lines, lenders
        self._poll = select.poll()
        self._by_descriptor = {line.socket.fileno(): line for line in lines.values()}

    @classmethod
    def meet(
        cls,
        member: int,
        share: Share,
        seconds: float,
        stop: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> Neighbors:
        """Find this member's neighbors. All members call it; each finds those of the same machine only.

        stop: called while waiting for others; it may raise. device: this member's accelerator, if it has one.
        MemberMissing for a neighbor that does not connect in `seconds`, or whatever `share` raises.
        """
        deadline = time.monotonic() + seconds
        probe = torch.tensor(list(os.urandom(PROBE_BYTES)), dtype=torch.uint8)  # from no stream of the training's
        permit_readers()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # Linux finds a name that is no file's
            listener.listen(BACKLOG)
            name = listener.getsockname().hex()
            here = {"machine": machine(), "process": os.getpid(), "socket": name}
            lent = Probe(device)
            cards = share("cards", {**here, "probe": [probe.data_ptr(), probe.tolist()], "device": lent.record})
            able = sorted(other for other, card in cards.items() if other != member and _can_read(card, here))
            found = share("readable", [able, [other for other in able if lent.can_read(cards[other]["device"])]])
            near, lenders = (  # the same on both sides
                {other for other in found[member][kind] if member in found[other][kind]} for kind in (0, 1)
            )
            lines: dict[int, Line] = {}
            try:
                for other in [each for each in sorted(near) if each > member]:
                    lines[other] = Line(other, *_call(other, cards[other], deadline))
                while len(lines) < len(near):
                    missing = {int(cards[each]["process"]): each for each in near - set(lines)}
                    other, process, link = _answer(listener, missing, deadline, stop)
                    lines[other] = Line(other, process, link)
            except BaseException:
                for line in lines.values():
                    line.close()
                raise
        return cls(lines, frozenset(lenders & near))

    @property
    def members(self) -> frozenset[int]:
        """Numbers of these members."""
        return frozenset(self._lines)

    def permit(self) -> None:
        """Let them read this process's memory, again if others that it had have been closed since: it is one permission
        for the whole process.
        """
        permit_readers()

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Offer the tensor's bytes; an accelerator's are copied to the host first."""
        line, data = self._line(member), bytes_of(tensor).to("cpu")
        return line.begin(Message(self, line, SEND, data, data), tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Ask for the next message of that tag."""
        line, data = self._line(member), bytes_of(tensor)
        host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=torch.uint8)
        return line.begin(Message(self, line, RECEIVE, data, host), tag)

    def advance(self, line: Line, what: str, since: float, deadline: float) -> None:
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
            line.close()
        self._lines = {}
        permit_readers(NOBODY)

    def _line(self, member: int) -> Line:
        if member not in self._lines:
            raise TransferError(f"member {member} is no neighbor; there are {sorted(self._lines)}")
        return self._lines[member]


class RoutedTransport:
    """Way to neighbors by their memory, and to everybody else over the group."""

    def __init__(self, near: Neighbors, far: Transport) -> None:
        self._near, self._far = near, far

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self._to(member).send(tensor, member, tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self._to(member).receive(tensor, member, tag)

    def _to(self, member: int) -> Transport:
        return self._near if member in self._near.members else self._far


def _can_read(card: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether a member is on this machine and the kernel lets this process read it."""
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
    """Connect to a neighbor with a higher number."""
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
) -> tuple[int, int, socket.socket]:
    """The next neighbor with a lower number that connects, its process; anybody else is sent away.

    missing: members by their processes. The kernel says which process it is and nothing is read, so whoever is silent
    holds nobody up.
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
            return missing[process], process, link
        link.close()
    raise MemberMissing("connecting on this machine", sorted(missing.values()), time.monotonic() - since)


def _process(link: socket.socket) -> int:
    """The process that has made the other end, as the kernel says."""
    return int(PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0])
