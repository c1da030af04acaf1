"""One direction of an exchange with one peer: messages started ahead, finished in order, staged in few slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from ds_dynatrain.transfer.messages import Message
from ds_dynatrain.transfer.prefault import allocate
from ds_dynatrain.transfer.regions import Regions
from ds_dynatrain.transfer.transport import Handle, Transport

SLOTS = 4
"""Staged messages under way per direction: enough that packing, wire and unpacking overlap."""


class Staging:
    """Host memory for staged messages, at most 2 * SLOTS of `chunk` bytes, used again and again.

    chunk: bytes of a slot. peak: the most bytes that were in use at once.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk, self._free, self._used = chunk, list[torch.Tensor](), 0
        self.peak = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A slot's first `nbytes` bytes."""
        slot = self._free.pop() if self._free else allocate(self.chunk, torch.uint8)
        self._used += nbytes
        self.peak = max(self.peak, self._used)
        return slot[:nbytes]

    def give(self, staged: torch.Tensor) -> None:
        """Return what `take` gave."""
        self._used -= staged.numel()
        self._free.append(staged.as_strided((self.chunk,), (1,)))


@dataclass
class _UnderWay:
    handle: Handle
    message: Message
    staged: torch.Tensor | None


@dataclass
class Stream:
    """The messages to (`is_send`) or from one member.

    `advance` starts what fits; `finish` waits for the oldest. Two members that each, again and again, advance both of
    their streams and then finish the oldest message of both never wait for each other: the oldest message of a stream
    is always started, and each finishes message i of both streams before it needs message i + 1 of either.
    """

    transport: Transport
    member: int
    tag: int
    is_send: bool
    regions: Regions
    messages: list[Message]
    staging: Staging
    _next: int = 0
    _slots: int = SLOTS
    _under_way: deque[_UnderWay] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether every message was started and finished."""
        return self._next == len(self.messages) and not self._under_way

    def advance(self) -> None:
        """Start messages in order until one needs a slot and none is free."""
        while self._next < len(self.messages):
            message = self.messages[self._next]
            view = self.regions.part(message.rows[0], message.start, message.stop) if not message.is_packed else None
            if view is None or view.device.type != "cpu":
                if not self._slots:
                    return
                self._slots -= 1
                self._start_staged(message)
            else:
                self._start(message, view, None)
            self._next += 1

    def finish(self, deadline: float) -> None:
        """Wait for the oldest message and put its bytes in place; nothing when all are done."""
        if not self._under_way:
            return
        oldest = self._under_way.popleft()
        oldest.handle.wait(deadline)
        if oldest.staged is None:
            return
        if not self.is_send:
            self._land(oldest.message, oldest.staged)
        self.staging.give(oldest.staged)
        self._slots += 1

    def _start_staged(self, message: Message) -> None:
        staged = self.staging.take(message.nbytes)
        if self.is_send and message.is_packed:
            self.regions.pack(message.rows, staged)
        elif self.is_send:
            staged.copy_(self.regions.part(message.rows[0], message.start, message.stop))
        self._start(message, staged, staged)

    def _start(self, message: Message, data: torch.Tensor, staged: torch.Tensor | None) -> None:
        start = self.transport.send if self.is_send else self.transport.receive
        self._under_way.append(_UnderWay(start(data, self.member, self.tag), message, staged))

    def _land(self, message: Message, staged: torch.Tensor) -> None:
        if message.is_packed:
            self.regions.unpack(message.rows, staged)
        else:
            self.regions.part(message.rows[0], message.start, message.stop).copy_(staged)
