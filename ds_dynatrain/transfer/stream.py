"""Messages between two members in one exchange: how moves are divided into messages, sent and received.

A large move is sent directly from buffer to buffer, in messages of at most `longest` bytes. Small moves are packed, in
order, into messages of at most `chunk` bytes, which both members stage. The list of messages depends only on the
lengths of the moves and on these two numbers, so sender and receiver compute the same list, and messages need no
header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from ds_dynatrain.transfer.prefault import allocate, prefault
from ds_dynatrain.transfer.regions import MoveRegions, Regions
from ds_dynatrain.transfer.series import Matrix, matrices
from ds_dynatrain.transfer.transport import Handle, Transport

SLOTS = 4
"""Most staged messages in flight per direction; enough to overlap packing, transport and unpacking."""
DIRECT_BYTES = 256 * 1024
"""Smallest move that is not packed, in bytes: from this size on, a separate message costs less than two copies."""


@dataclass(frozen=True)
class MoveBatch:
    """The moves that one message contains: several whole moves, or a range of bytes of a single one.

    rows: the row numbers of the moves.
    start: the first byte of the range in a single move; 0 for several moves.
    stop: the end of the range in a single move; the total bytes of several moves.
    """

    rows: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length of the message in bytes."""
        return self.stop - self.start


def messages(lengths: Iterable[int], chunk: int, longest: int) -> list[MoveBatch]:
    """Divide moves into messages, and return the messages in sending order.

    lengths: the length of each move in bytes.
    chunk: most bytes of a message of packed moves.
    longest: most bytes of a message with part of a single large move.
    """
    length = np.array([*lengths], dtype=np.int64)
    direct = length >= min(DIRECT_BYTES, chunk)
    found: list[tuple[int, MoveBatch]] = []
    for row, total in zip(np.flatnonzero(direct).tolist(), length[direct].tolist(), strict=True):
        cuts = range(0, total, longest)
        found += [(row, MoveBatch((row,), start, min(start + longest, total))) for start in cuts]
    small = np.flatnonzero(~direct & (length > 0))
    ends = np.cumsum(length[small])
    first, before = 0, 0
    while first < len(small):  # a message is full when the next move does not fit
        last = int(np.searchsorted(ends, before + chunk, side="right"))
        when, after = int(small[last]) if last < len(small) else len(length), int(ends[last - 1])
        found.append((when, MoveBatch(tuple(small[first:last].tolist()), 0, after - before)))
        first, before = last, after
    return [message for _, message in sorted(found, key=lambda each: each[0])]


@dataclass(frozen=True)
class Parcel:
    """A message, and the places in local buffers that contain its bytes.

    nbytes: the length of the message.
    matrices: the places in the order of the message, as series of runs of bytes.
    """

    nbytes: int
    matrices: tuple[Matrix, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the bytes must be packed into staging memory."""
        return len(self.matrices) > 1 or self.matrices[0].number > 1


@dataclass(frozen=True)
class MessageOutline:
    """The messages of one direction of an exchange.

    places: the regions that the moves read or write.
    parcels: the messages in sending order.
    longest: bytes of the longest message.
    slots: most staging slots that this direction uses at once for packed messages.
    """

    places: MoveRegions
    parcels: tuple[Parcel, ...]
    longest: int
    slots: int

    @staticmethod
    def of(places: MoveRegions, chunk: int, longest: int) -> MessageOutline:
        """Divide moves into messages with `messages`, and find the bytes of each message in local buffers.

        Both members get the same messages, but a message may be packed on one member only.
        """
        parcels, reach, slots = list[Parcel](), 0, 0
        for message in messages(places.length.tolist(), chunk, longest):
            rows, nbytes = [*message.rows], message.nbytes
            if len(rows) > 1:
                found = matrices(places.which[rows], places.begin[rows], places.length[rows])
            else:
                begin = int(places.begin[rows[0]]) + message.start
                found = [Matrix(int(places.which[rows[0]]), begin, 0, 1, nbytes)]
            parcels.append(Parcel(nbytes, tuple(found)))
            reach, slots = max(reach, nbytes), slots + parcels[-1].is_packed
        return MessageOutline(places, tuple(parcels), reach, min(SLOTS, slots))


@dataclass(eq=False)
class Staging:
    """A pool of reusable slots of staging memory; a running exchange uses at most 2 * SLOTS of them.

    chunk: the size of a slot in bytes.
    is_pinned: whether slots are page-locked, which makes an accelerator's copies asynchronous and four to seven times
        as fast.
    peak: most bytes in use at once so far.
    """

    chunk: int
    is_pinned: bool = False
    peak: int = 0
    _free: list[torch.Tensor] = field(default_factory=list)
    _used: int = 0

    def reserve(self, slots: int) -> None:
        """Allocate slots until `slots` of them are free, and touch their memory so that first use is fast."""
        while len(self._free) < slots:
            slot = self._slot()
            if not self.is_pinned:  # pinned memory is allocated already
                prefault(slot)
            self._free.append(slot)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` bytes of a free slot, or of a new one."""
        slot = self._free.pop() if self._free else self._slot()
        self._used += nbytes
        self.peak = max(self.peak, self._used)
        return slot[:nbytes]

    def give(self, staged: torch.Tensor) -> None:
        """Put a slot that `take` returned back into the pool."""
        self._used -= staged.numel()
        self._free.append(staged.as_strided((self.chunk,), (1,)))

    def _slot(self) -> torch.Tensor:
        """Allocate a slot, page-locked if requested; from the first failure to lock memory on, use ordinary memory."""
        if self.is_pinned:
            with suppress(RuntimeError):
                return torch.empty(self.chunk, dtype=torch.uint8, pin_memory=True)
            self.is_pinned = False
        return allocate(self.chunk, torch.uint8)


@dataclass
class _UnderWay:
    handle: Handle
    parcel: Parcel
    staged: torch.Tensor | None


@dataclass
class Stream:
    """The messages that this member sends to another one (if `is_send`) or receives from it, in one exchange.

    `advance` starts messages while slots are free; `finish` waits for the oldest one. Two members that repeatedly
    advance both of their streams and then finish the oldest message of both cannot deadlock: the oldest message of a
    stream is always started, and a member finishes message i of both streams before it needs message i + 1 of either.
    """

    transport: Transport
    member: int
    tag: int
    is_send: bool
    regions: Regions
    parcels: Sequence[Parcel]
    staging: Staging
    _next: int = 0
    _slots: int = SLOTS
    _under_way: deque[_UnderWay] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether all messages are finished."""
        return self._next == len(self.parcels) and not self._under_way

    def advance(self) -> None:
        """Start messages in order until one needs a slot and none is free."""
        while self._next < len(self.parcels):
            parcel = self.parcels[self._next]
            if parcel.is_packed or not self.regions.is_on_host:
                if not self._slots:
                    return
                self._slots -= 1
                staged = self.staging.take(parcel.nbytes)
                if self.is_send:
                    self.regions.pack(parcel.matrices, staged)
                    self.regions.wait()  # the host is about to read and send it
                self._start(parcel, staged, staged)
            else:
                self._start(parcel, self.regions.view(parcel.matrices[0]), None)
            self._next += 1

    def finish(self, deadline: float) -> None:
        """Wait for the oldest started message, and unpack it if it was received. Do nothing if none is started."""
        if not self._under_way:
            return
        oldest = self._under_way.popleft()
        oldest.handle.wait(deadline)
        if oldest.staged is None:
            return
        if not self.is_send:
            self.regions.unpack(oldest.parcel.matrices, oldest.staged)
            self.regions.wait()  # the slot will be reused
        self.staging.give(oldest.staged)
        self._slots += 1

    def _start(self, parcel: Parcel, data: torch.Tensor, staged: torch.Tensor | None) -> None:
        start = self.transport.send if self.is_send else self.transport.receive
        self._under_way.append(_UnderWay(start(data, self.member, self.tag), parcel, staged))
