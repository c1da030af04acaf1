"""Messages between two members in one exchange: how moves are divided into messages, sent and received.

A long row of a move is sent directly from buffer to buffer, in messages of at most `longest` bytes. Short rows are
packed, in order, into messages of at most `chunk` bytes, which both members stage. The list of messages depends only on
the shapes of the moves and on these two numbers, so sender and receiver compute the same list, and messages need no
header.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ds_dynatrain.transfer.prefault import allocate, prefault
from ds_dynatrain.transfer.regions import MoveRegions, Regions
from ds_dynatrain.transfer.series import Matrix
from ds_dynatrain.transfer.transport import Handle, Transport

SLOTS = 4
"""Maximum number of staged messages in transit per direction; enough to overlap packing, transport and unpacking."""
DIRECT_BYTES = 256 * 1024
"""Minimum size of a row that is not packed, in bytes. From this size on, a separate message costs less than two
copies."""


class Part(NamedTuple):
    """A part of a move that is sent in one message: the bytes from `start` to `stop` of each of `number` rows,
    beginning with row `first`.

    move: the index of the move.
    """

    move: int
    first: int
    number: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.number * (self.stop - self.start)


def messages(lengths: Iterable[int], numbers: Iterable[int], chunk: int, longest: int) -> list[tuple[Part, ...]]:
    """Divide moves into messages, and return the messages in sending order.

    lengths: the number of bytes in a row of each move.
    numbers: the number of rows of each move.
    chunk: the maximum size of a message that packs short rows, in bytes.
    longest: the maximum size of a message with part of a single long row, in bytes.
    """
    found, packed, room = list[tuple[Part, ...]](), list[Part](), chunk
    for move, (length, number) in enumerate(zip(lengths, numbers, strict=True)):
        if length >= min(DIRECT_BYTES, chunk):
            for row, start in itertools.product(range(number), range(0, length, longest)):
                found.append((Part(move, row, 1, start, min(start + longest, length)),))
            continue
        row = 0
        while row < number and length:
            fitting = min(room // length, number - row)
            if fitting:
                packed.append(Part(move, row, fitting, 0, length))
            else:  # the message is full
                found.append(tuple(packed))
                packed, room = [], chunk
            room, row = room - fitting * length, row + fitting
    return [*found, tuple(packed)] if packed else found


@dataclass(frozen=True)
class Parcel:
    """A message, and the regions of local buffers that contain its bytes.

    nbytes: the length of the message.
    matrices: the regions in the order in which the message contains them.
    """

    nbytes: int
    matrices: tuple[Matrix, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the message's bytes must be packed into staging memory."""
        return len(self.matrices) > 1 or self.matrices[0].number > 1


@dataclass(frozen=True)
class MessageOutline:
    """The messages of one direction of an exchange between two members.

    places: the regions that the moves read or write.
    parcels: the messages in sending order.
    longest: the size of the longest message, in bytes.
    slots: the maximum number of staging slots that this direction uses at once for packed messages.
    """

    places: MoveRegions
    parcels: tuple[Parcel, ...]
    longest: int
    slots: int

    @staticmethod
    def of(places: MoveRegions, chunk: int, longest: int) -> MessageOutline:
        """Divide moves into messages, and find the bytes of each message in local buffers.

        chunk, longest: as in `messages`.

        Sender and receiver get the same messages, but a message may need packing on only one of the two.
        """
        parcels, reach, slots = list[Parcel](), 0, 0
        columns = [column.tolist() for column in (places.which, places.begin, places.step)]
        for parts in messages(places.length.tolist(), places.number.tolist(), chunk, longest):
            found, nbytes = list[Matrix](), 0
            for part in parts:
                which, begin, step = (column[part.move] for column in columns)
                begin += part.first * step + part.start
                _add(found, Matrix(which, begin, step, part.number, part.stop - part.start))
                nbytes += part.nbytes
            parcels.append(Parcel(nbytes, tuple(found)))
            reach, slots = max(reach, nbytes), slots + parcels[-1].is_packed
        return MessageOutline(places, tuple(parcels), reach, min(SLOTS, slots))


def _add(found: list[Matrix], matrix: Matrix) -> None:
    """Append a matrix to a list or, if it directly follows the last one in the same buffer, extend the last one by
    it."""
    which, begin, step, number, length = matrix
    if number == 1 or step == length:
        length, step, number = number * length, 0, 1
        last = found[-1] if found else matrix
        if last.number == 1 and (last.which, last.begin + last.length) == (which, begin):
            found[-1] = last._replace(length=last.length + length)
            return
    found.append(Matrix(which, begin, step, number, length))


@dataclass(eq=False)
class Staging:
    """A pool of reusable slots of staging memory; an exchange in progress uses at most 2 * SLOTS of them.

    chunk: the size of a slot in bytes.
    is_pinned: whether slots are page-locked, which makes an accelerator's copies asynchronous and four to seven times
        as fast.
    peak: the largest number of bytes in use at once so far.
    """

    chunk: int
    is_pinned: bool = False
    peak: int = 0
    _free: list[torch.Tensor] = field(default_factory=list)
    _used: int = 0

    def reserve(self, slots: int) -> None:
        """Allocate memory until `slots` slots are free, and touch the memory so that its first use is fast."""
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
        """Return a slot, obtained from `take`, to the pool."""
        self._used -= staged.numel()
        self._free.append(staged.as_strided((self.chunk,), (1,)))

    def _slot(self) -> torch.Tensor:
        """Allocate a slot, page-locked if requested. Once locking memory has failed, all further slots use ordinary
        memory."""
        if self.is_pinned:
            with suppress(RuntimeError):
                return torch.empty(self.chunk, dtype=torch.uint8, pin_memory=True)
            self.is_pinned = False
        return allocate(self.chunk, torch.uint8)


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
    _under_way: deque[tuple[Handle, Parcel, torch.Tensor | None]] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether all messages have been sent or received."""
        return self._next == len(self.parcels) and not self._under_way

    def advance(self) -> None:
        """Start messages in order, until the next one needs a slot and none is free."""
        while self._next < len(self.parcels):
            parcel, staged = self.parcels[self._next], None
            if parcel.is_packed or not self.regions.is_on_host:
                if not self._slots:
                    return
                self._slots -= 1
                staged = self.staging.take(parcel.nbytes)
                if self.is_send:
                    self.regions.pack(parcel.matrices, staged)
                    self.regions.wait()  # the host is about to read and send it
            data = self.regions.view(parcel.matrices[0]) if staged is None else staged
            start = self.transport.send if self.is_send else self.transport.receive
            self._under_way.append((start(data, self.member, self.tag), parcel, staged))
            self._next += 1

    def finish(self, deadline: float) -> None:
        """Wait for the oldest started message and, if it was received, unpack it. Does nothing if no message is
        started."""
        if not self._under_way:
            return
        handle, parcel, staged = self._under_way.popleft()
        handle.wait(deadline)
        if staged is None:
            return
        if not self.is_send:
            self.regions.unpack(parcel.matrices, staged)
            self.regions.wait()  # the slot will be reused
        self.staging.give(staged)
        self._slots += 1
