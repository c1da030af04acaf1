"""A round of copies: each member's copy goes to its buddies, over a separate group and from a thread, during training.

A *ward* is a member whose copy is kept by this one. The ward sends the length of its copy in bytes, and the buddy
answers whether it has room. After that the ward sends the bytes, then the length of the header, and the header itself.
The header is last because it contains the digests. Finally the buddy answers whether it has received everything. A
length of -1 says that there is no copy. Whatever fails on one member, all others reach the end of the round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_dynatrain.buddies.taking import UndigestedCopy, copy_of, header_of
from ds_dynatrain.engine.copies.kept import Kept, Room
from ds_dynatrain.errors import DynatrainError, TransferError
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.transfer import Handle, Transport

TO_BUDDY, TO_WARD = 1, 2
"""Tags of messages from ward to buddy, and from buddy to ward."""
NOTHING = -1
LONGEST_HEADER = 1 << 30
SECONDS = 1800.0
"""Time-out of a round. It equals that of training's collectives, so a member that takes longer has stopped."""


@dataclass(frozen=True)
class Ward:
    """A member whose copy this member keeps.

    member: the member's number.
    rank: the member's rank.
    room: the memory for the copy.
    """

    member: int
    rank: int
    room: Room


class Round:
    """One exchange of copies: each rank sends its copy to its buddies, and receives the copies that it is to keep.

    taken: this member's own copy; None if it could not be taken.
    is_over: whether the thread has finished.
    is_whole: whether this member's own copy has reached its buddies, and the copies of all members that it keeps copies
        for have arrived here.
    is_void: whether the copies of the round do not count, whatever its outcome.
    """

    def __init__(
        self,
        mark: Mark,
        taken: UndigestedCopy | None,
        buddies: Sequence[int],
        wards: Sequence[Ward],
        transport: Transport,
        kept: Kept,
    ) -> None:
        self.mark, self.sent_bytes, self.seconds = mark, 0, 0.0
        self.is_whole = self.is_void = False
        self.error = "this member has taken none" if taken is None else ""
        self._taken, self._buddies, self._wards, self._kept = taken, tuple(buddies), wards, kept
        self._transport = transport
        self._under_way = list[Handle]()
        self._deadline = time.monotonic() + SECONDS
        self.is_over = False

    def run(self) -> None:
        """Carry out the exchange of copies. This is the body of the round's thread, and raises nothing."""
        begin = time.perf_counter()
        try:
            self._carry_out()
        except Exception as error:  # any error: training continues, and all members learn that the round is not whole
            self._note(f"{type(error).__name__}: {error}")
        finally:
            del self._transport, self._taken, self._under_way  # these objects would keep the process group alive
            self.seconds = time.perf_counter() - begin
            self.is_whole = not self.error
            self.is_over = True

    def _note(self, error: str) -> None:
        """Record the first error of the round."""
        self.error = self.error or error

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Exchange copies, headers and answers.

        Sends are waited for only at the end, because each one ends only when the other side receives it.
        """
        own = None if self._taken is None else self._taken.memory
        for buddy in self._buddies:
            self._offer(own, buddy)
        memories = [(ward, self._ask(ward)) for ward in self._wards]
        reached = [buddy for buddy in self._buddies if own is not None and self._send_if_welcome(own, buddy)]
        arriving = [self._receive(memory, ward) for ward, memory in memories if memory is not None]
        header = self._header()
        for buddy in self._buddies:
            told = header if buddy in reached else None
            self._offer(told, buddy)
            if told is not None:
                self._send(told, buddy, TO_BUDDY)
        for handle in arriving:
            handle.wait(self._deadline)
        for ward, memory in memories:
            self._send(torch.tensor([int(self._take_in(ward, memory))]), ward.member, TO_WARD)
        for buddy in self._buddies:
            if not self._answer(buddy):
                self._note(f"member {buddy} does not have the copy of this member")
        for handle in self._under_way:
            handle.wait(self._deadline)

    def _header(self) -> torch.Tensor | None:
        """Return the header of this member's own copy, which is kept from this point on; None if the copy cannot be
        described."""
        if self._taken is None:
            return None
        try:
            copy = self._taken.copy()
            header = header_of(copy)
        except (DynatrainError, TypeError, ValueError) as error:
            self._note(f"{type(error).__name__}: {error}")
            return None
        self._kept.add(copy)
        return torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def _take_in(self, ward: Ward, memory: torch.Tensor | None) -> bool:
        """Receive a ward's header and keep its copy, and return whether the copy is the expected one.

        memory: the bytes of the copy; None if they were not sent.
        """
        if (length := self._length(ward)) < 0:
            return False
        if length > LONGEST_HEADER:  # the ward sends it whatever is answered, so the round cannot go on
            raise TransferError(f"a header of {length} bytes was announced, at most {LONGEST_HEADER} are taken")
        said = torch.empty(length, dtype=torch.uint8)
        self._receive(said, ward).wait(self._deadline)
        try:
            if memory is None:
                raise TransferError(f"member {ward.member} described a copy that it did not send")
            copy = copy_of(said.numpy().tobytes(), memory)
            if (copy.mark, copy.rank) != (self.mark, ward.rank):
                raise TransferError(
                    f"member {ward.member} sent a copy of rank {copy.rank} at step {copy.mark.step}, and that of rank "
                    f"{ward.rank} at step {self.mark.step} was due"
                )
        except TransferError as error:
            self._note(str(error))
            return False
        self._kept.add(copy)
        return True

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _offer(self, values: torch.Tensor | None, buddy: int) -> None:
        """Send a buddy the length of a message, or `NOTHING` if there is no message."""
        self._send(torch.tensor([NOTHING if values is None else values.numel()]), buddy, TO_BUDDY)

    def _send_if_welcome(self, values: torch.Tensor, buddy: int) -> bool:
        if not self._answer(buddy):
            self._note(f"member {buddy} has no room for the copy of this member")
            return False
        self._send(values, buddy, TO_BUDDY)
        return True

    def _answer(self, buddy: int) -> bool:
        """Wait for a buddy's answer and return whether it was yes."""
        answer = torch.zeros(1, dtype=torch.int64)
        self._transport.receive(answer, buddy, TO_WARD).wait(self._deadline)
        return bool(answer.item())

    def _length(self, ward: Ward) -> int:
        """Receive and return the length of a ward's message; `NOTHING` if no message will come."""
        numel = torch.zeros(1, dtype=torch.int64)
        self._receive(numel, ward).wait(self._deadline)
        if numel < 0:
            self._note(f"member {ward.member} has no copy to send")
        return int(numel)

    def _ask(self, ward: Ward) -> torch.Tensor | None:
        """Receive the length of a ward's copy, and answer whether there is room for the copy.

        Returns the memory for the copy, or None if no copy will come.
        """
        memory: torch.Tensor | None = None
        if (length := self._length(ward)) < 0:
            return None
        try:
            memory = ward.room.fit(length)
        except (MemoryError, OSError) as error:
            self._note(f"no room for the copy of member {ward.member}: {error}")
        self._send(torch.tensor([int(memory is not None)]), ward.member, TO_WARD)
        return memory

    def _send(self, values: torch.Tensor, member: int, tag: int) -> None:
        self.sent_bytes += values.nbytes
        self._under_way.append(self._transport.send(values, member, tag))

    def _receive(self, memory: torch.Tensor, ward: Ward) -> Handle:
        return self._transport.receive(memory, ward.member, TO_BUDDY)
