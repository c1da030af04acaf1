"""Members on one machine that may not read each other's memory: two copies, through a small ring that both have mapped.

A ring is one way: two slots of memory that no file system knows (`memfd_create`), made by the sender, whose descriptor
travels over the Unix socket. So nothing is left over, however its processes end. It stays in the cache of the
processor, and while the receiver empties one slot the sender fills the other.

The receiver asks for a message (SEND) when it has both an offer and a place, so messages pass the ring in an order that
both know, and none stands in the way of another. The sender says what it has put into a slot (FILLED), the receiver
when the slot is empty again (FREED). Its size is sealed: a neighbor cannot take mapped memory away.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from dataclasses import dataclass, field

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.line import FILLED, FREED, RING, SEND, TAKEN, Key, Line
from ds_dynatrain.transfer.prefault import prefault

SLOTS, SLOT_BYTES = 2, 4 << 20
RING_BYTES = SLOTS * SLOT_BYTES
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0
NO_KEY: Key = (0, 0)


def can_share() -> bool:
    """Whether this machine lets a process make memory that others can map."""
    try:
        os.close(_make())
    except (AttributeError, OSError):
        return False
    return True


@dataclass
class _Way:
    """A message that is passing: how many of its bytes have been copied."""

    key: Key
    data: torch.Tensor
    done: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all of it was copied."""
        return self.done == self.data.numel()


@dataclass
class RingLine(Line):
    """The sender copies into a ring, the receiver out of it."""

    kept: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Offered messages of ours that the neighbor has not asked for."""
    leaving: deque[_Way] = field(default_factory=deque)
    coming: deque[_Way] = field(default_factory=deque)
    outgoing: torch.Tensor | None = None
    incoming: torch.Tensor | None = None
    free: int = SLOTS
    next_out: int = 0
    next_in: int = 0
    full: deque[int] = field(default_factory=deque)
    """Bytes in the slots that the neighbor has filled and that are not emptied yet."""

    def reserve(self) -> None:
        """Make the outgoing ring now, its memory touched, rather than with the first message."""
        if self.outgoing is None:
            descriptor = _make()
            self.outgoing = _mapped(descriptor)
            self.say(RING, NO_KEY, length=RING_BYTES, descriptor=descriptor)
            prefault(self.outgoing)

    def offer(self, tag: int, data: torch.Tensor) -> Key:
        """See `Line`."""
        key = super().offer(tag, data)
        self.kept[key] = data
        return key

    def want(self, tag: int, into: torch.Tensor) -> Key:
        """See `Line`."""
        key = super().want(tag, into)
        self._ask()
        return key

    def hear(self, kind: int, key: Key, address: int, length: int, descriptors: list[int]) -> None:
        """See `Line`; TransferError for what a neighbor that keeps the rules does not say."""
        if kind == RING and self.incoming is None and len(descriptors) == 1:
            self.incoming = _taken_in(self.member, descriptors.pop())
        elif kind == SEND and key in self.kept:
            self.leaving.append(_Way(key, self.kept.pop(key)))
        elif kind == FILLED and self.incoming is not None and len(self.full) < SLOTS and 0 < length <= SLOT_BYTES:
            self.full.append(length)
        elif kind == FREED and self.free < SLOTS:
            self.free += 1
        elif kind in (RING, SEND, FILLED, FREED):
            for descriptor in descriptors:
                os.close(descriptor)
            raise TransferError(f"member {self.member} says {kind} of message {key} out of turn")
        super().hear(kind, key, address, length, descriptors)

    def settle(self) -> None:
        """Ask for what can come, fill free slots, empty full ones."""
        self._ask()
        while self.leaving and self.free:
            self._fill(self.leaving[0])
        while self.full:
            self._empty(self.full.popleft())

    def close(self) -> None:
        """End the connection, and let go of both rings."""
        super().close()
        self.outgoing = self.incoming = None

    def _ask(self) -> None:
        for key, _, into in self.meets():
            self.coming.append(_Way(key, into))
            self.say(SEND, key)

    def _fill(self, way: _Way) -> None:
        self.reserve()
        if self.outgoing is None:
            raise RuntimeError("a ring was reserved and is not there")
        length = min(SLOT_BYTES, way.data.numel() - way.done)
        at = self.next_out * SLOT_BYTES
        self.outgoing[at : at + length].copy_(way.data[way.done : way.done + length])
        way.done += length
        self.free, self.next_out = self.free - 1, (self.next_out + 1) % SLOTS
        self.say(FILLED, way.key, length=length)
        if way.is_done:
            self.leaving.popleft()

    def _empty(self, length: int) -> None:
        way = self.coming[0] if self.coming else None
        if way is None or self.incoming is None or length > way.data.numel() - way.done:
            raise TransferError(f"member {self.member} has sent {length} bytes that nobody asked for")
        at = self.next_in * SLOT_BYTES
        way.data[way.done : way.done + length].copy_(self.incoming[at : at + length])
        way.done += length
        self.next_in = (self.next_in + 1) % SLOTS
        self.say(FREED, way.key)
        if way.is_done:
            self.coming.popleft()
            self.arrived.add(way.key)
            self.say(TAKEN, way.key)


def _make() -> int:
    """New shared memory of a ring's size, which it keeps."""
    descriptor = os.memfd_create("dynatrain-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, RING_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _taken_in(member: int, descriptor: int) -> torch.Tensor:
    """A neighbor's ring, mapped; TransferError for anything that could be cut short under our hands."""
    try:
        if os.fstat(descriptor).st_size != RING_BYTES or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise TransferError(f"member {member} sent no ring of {RING_BYTES} bytes")
        return _mapped(descriptor)
    except OSError as error:
        raise TransferError(f"the ring of member {member} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> torch.Tensor:
    """The memory as bytes; it is unmapped when nobody has the tensor any more."""
    return torch.frombuffer(mmap.mmap(descriptor, RING_BYTES), dtype=torch.uint8)
