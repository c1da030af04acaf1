"""One direction of an exchange with one peer: messages started ahead, finished in order, staged in few slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ds_dynatrain.transfer.outline import Parcel
from ds_dynatrain.transfer.regions import Regions
from ds_dynatrain.transfer.staging import SLOTS, Staging
from ds_dynatrain.transfer.transport import Handle, Transport


@dataclass
class _UnderWay:
    handle: Handle
    parcel: Parcel
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
    parcels: Sequence[Parcel]
    staging: Staging
    _next: int = 0
    _slots: int = SLOTS
    _under_way: deque[_UnderWay] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether every message was started and finished."""
        return self._next == len(self.parcels) and not self._under_way

    def advance(self) -> None:
        """Start messages in order until one needs a slot and none is free."""
        while self._next < len(self.parcels):
            parcel = self.parcels[self._next]
            if parcel.is_packed or not self.regions.is_on_host:
                if not self._slots:
                    return
                self._slots -= 1
                self._start_staged(parcel)
            else:
                self._start(parcel, self.regions.view(parcel.matrices[0]), None)
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
            self.regions.unpack(oldest.parcel.matrices, oldest.staged)
            self.regions.wait()  # the slot is another message's next
        self.staging.give(oldest.staged)
        self._slots += 1

    def _start_staged(self, parcel: Parcel) -> None:
        staged = self.staging.take(parcel.nbytes)
        if self.is_send:
            self.regions.pack(parcel.matrices, staged)
            self.regions.wait()  # the host sends it, and reads what is there by now
        self._start(parcel, staged, staged)

    def _start(self, parcel: Parcel, data: torch.Tensor, staged: torch.Tensor | None) -> None:
        start = self.transport.send if self.is_send else self.transport.receive
        self._under_way.append(_UnderWay(start(data, self.member, self.tag), parcel, staged))
