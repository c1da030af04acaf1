"""One round: each member's copy goes to its buddy, over a group of its own and from a thread, while training goes on.

A copy travels as the number of its bytes, the bytes, the number of its header's bytes, and the header, which has the
digests and so comes last. A number below zero says that there is no copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_dynatrain.engine.buddies.copy import Mark
from ds_dynatrain.engine.buddies.kept import Kept, Room
from ds_dynatrain.engine.buddies.message import copy_of, header_of
from ds_dynatrain.engine.buddies.taking import Taken
from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer import Handle, Transport

TAG = 1
NOTHING = -1
SECONDS = 1800.0
"""As long as collectives of training wait: who is later than that has stopped."""


@dataclass(frozen=True)
class Ends:
    """Whom a member sends its copy to, and the members, with their ranks, whose copies it keeps."""

    buddy: int
    wards: Sequence[tuple[int, int]]


class Round:
    """One copy of each rank on its way. taken: None where this member could not take its own.

    is_over: the thread has nothing more to do. is_whole: the own copy has left and those of all wards are here.
    is_void: it does not count, whatever becomes of it.
    """

    def __init__(
        self, mark: Mark, taken: Taken | None, rooms: Sequence[Room], ends: Ends, transport: Transport, kept: Kept
    ) -> None:
        self.mark, self.sent_bytes, self.seconds = mark, 0, 0.0
        self.is_whole = self.is_void = False
        self.error = ""
        self._taken, self._rooms, self._ends, self._kept = taken, rooms, ends, kept
        self._transport: Transport | None = transport
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """See the class."""
        return self._over.is_set()

    def run(self) -> None:
        """In a thread."""
        begin = time.perf_counter()
        try:
            self._carry_out(time.monotonic() + SECONDS)
        except Exception as error:  # of whatever kind: training goes on, and all learn that it is not whole
            self.error = self.error or f"{type(error).__name__}: {error}"
        finally:
            self._transport = self._taken = None  # which holds the group
            self.seconds = time.perf_counter() - begin
            self.is_whole = not self.error
            self._over.set()

    def _carry_out(self, deadline: float) -> None:
        sent = self._send_bytes(None if self._taken is None else self._taken.memory)
        arriving = [
            self._begin(*ward, room, deadline) for ward, room in zip(self._ends.wards, self._rooms, strict=True)
        ]
        header = self._seal() if self._taken is not None else None
        if self._taken is not None:
            sent += self._send_bytes(header)
        for member, rank, memory, handle in arriving:
            if memory is None:
                self.error = self.error or f"member {member} has taken none"
                continue
            handle.wait(deadline)
            self._receive_header(member, rank, memory, deadline)
        for each in sent:
            each.wait(deadline)

    def _seal(self) -> torch.Tensor | None:
        """The own copy, with its digests; None if it cannot be described: the buddy is told that then."""
        if self._taken is None:
            return None
        try:
            copy = self._taken.copy()
            header = header_of(copy)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            return None
        self._kept.add(copy)
        return torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def _receive_header(self, member: int, rank: int, memory: torch.Tensor, deadline: float) -> None:
        header = self._receive_bytes(member, Room(), deadline)
        if header is None:
            self.error = self.error or f"member {member} could not describe its copy"
            return
        copy = copy_of(header.numpy().tobytes(), memory)
        if (copy.mark, copy.rank) != (self.mark, rank):
            raise TransferError(
                f"member {member} sent a copy of rank {copy.rank} at step {copy.mark.step}, and rank {rank} at step "
                f"{self.mark.step} was due"
            )
        self._kept.add(copy)

    # ---- messages ----------------------------------------------------------------------------------------------------

    @property
    def _way(self) -> Transport:
        if self._transport is None:
            raise TransferError("this round is over")
        return self._transport

    def _send_bytes(self, values: torch.Tensor | None) -> list[Handle]:
        numel = NOTHING if values is None else values.numel()
        self.sent_bytes += max(0, numel)
        parts = [torch.tensor([numel]), *([] if values is None else [values])]
        return [self._way.send(part, self._ends.buddy, TAG) for part in parts]

    def _begin(
        self, member: int, rank: int, room: Room, deadline: float
    ) -> tuple[int, int, torch.Tensor | None, Handle]:
        """(the ward, its rank, where its bytes will be, or nothing if it has none, the receive of them)."""
        numel = torch.zeros(1, dtype=torch.int64)
        handle = self._way.receive(numel, member, TAG)
        handle.wait(deadline)
        if numel.item() < 0:
            return member, rank, None, handle
        memory = room.fit(int(numel))
        return member, rank, memory, self._way.receive(memory, member, TAG)

    def _receive_bytes(self, member: int, room: Room, deadline: float) -> torch.Tensor | None:
        _, _, memory, handle = self._begin(member, NOTHING, room, deadline)
        if memory is not None:
            handle.wait(deadline)
        return memory
