"""Members on one machine that read each other's memory, where the kernel permits it; else none is found.

A sender offers a message over a Unix socket; the receiver takes it (`line`) and says so. Nothing that a peer says is
trusted beyond that: lengths must be those expected, and what was read is proved by the certificate of the switch as if
it had come over a wire.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer.cross_memory import NOBODY, machine, permit_readers, read_memory
from ds_dynatrain.transfer.device_memory import Probe
from ds_dynatrain.transfer.line import Key, Line
from ds_dynatrain.transfer.transport import Handle, Transport, bytes_of

Share = Callable[[str, Any], Mapping[int, Any]]
"""`share(what, record)`: tell all members this one's record (plain JSON), and return all of theirs by member."""

PEER = struct.Struct("=iII")
"""`struct ucred`: process, user, group."""
PROBE_BYTES = 16
BACKLOG = 4096
STOP_SECONDS = 0.05
"""Between two looks for a reason to give up."""


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
            lent = Probe.of(device)
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
        """Who they are."""
        return frozenset(self._lines)

    def permit(self) -> None:
        """Let them read this process's memory, again if others that it had have been closed since: it is one permission
        for the whole process.
        """
        permit_readers()

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Offer the tensor's bytes; an accelerator's are copied to the host first."""
        line, data = self._line(member), bytes_of(tensor).to("cpu")
        if not data.numel():
            return _Done()
        return _Sent(self, line, line.offer(tag, data), data)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Ask for the next message of that tag."""
        line, data = self._line(member), bytes_of(tensor)
        if not data.numel():
            return _Done()
        host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=torch.uint8)
        return _Received(self, line, line.want(tag, host), data, host)

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
    """From and into the memory of neighbors, everybody else over the group."""

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
    line: Line
    key: Key
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
    line: Line
    key: Key
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
