"""A round of copies: each member's copy goes to its buddies, over a separate group and from a thread, during training.

A *ward* is a member whose copy is kept by this one. The ward sends the length of its copy in bytes, and the buddy
answers whether it has room. After that the ward sends the bytes, then the length of the header, and the header itself.
The header is last because it contains the digests. Finally the buddy answers whether it has received everything. A
length of -1 says that there is no copy. Whatever fails on one member, all others reach the end of the round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ds_dynatrain.adapters.groups.device import start_thread
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.buddies.assignment import wards_of
from ds_dynatrain.buddies.taking import UndigestedCopy, copy_of, header_of, take
from ds_dynatrain.engine.copies.kept import Kept, Room
from ds_dynatrain.errors import DynatrainError, TransferError, WorldChanged
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.plan import has_single_holders
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.transfer import GroupTransport, Handle, Transport

TO_BUDDY, TO_WARD = 1, 2
"""Tags of messages from ward to buddy, and from buddy to ward."""
NOTHING = -1
LONGEST_HEADER = 1 << 30
SECONDS = 1800.0
"""Time-out of a round. It equals that of training's collectives, so a member that takes longer has stopped."""


@dataclass(frozen=True)
class Ward:
    """A member whose copy is kept here.

    member: the member's number.
    rank: the member's rank.
    room: the memory for the copy.
    """

    member: int
    rank: int
    room: Room


class Round:
    """The exchange of one copy of each rank.

    taken: this member's own copy; None if it could not be taken.
    is_over: whether the thread has finished.
    is_whole: whether this member's own copy has reached its buddies and the copies of all wards have arrived here.
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
        self._transport: Transport | None = transport
        self._under_way: list[Handle] = []
        self._deadline = time.monotonic() + SECONDS
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether the round's thread has finished its work."""
        return self._over.is_set()

    def run(self) -> None:
        """Carry out the round. This is the body of the round's thread."""
        begin = time.perf_counter()
        try:
            self._carry_out()
        except Exception as error:  # of any kind: training continues, and all members learn that the round is not whole
            self._note(f"{type(error).__name__}: {error}")
        finally:
            self._transport, self._taken, self._under_way = None, None, []  # these hold the group
            self.seconds = time.perf_counter() - begin
            self.is_whole = not self.error
            self._over.set()

    def _note(self, error: str) -> None:
        """Record the first error of the round."""
        self.error = self.error or error

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Exchange copies, headers and answers.

        Sends are waited for only at the end, because each one ends only when the other side receives it.
        """
        own = None if self._taken is None else self._taken.memory
        self._offer(own, self._buddies)
        values = {ward.rank: self._ask(ward, ward.room) for ward in self._wards}
        reached = () if own is None else self._send_where_welcome(own, self._buddies)
        arriving = [self._receive(memory, ward) for ward in self._wards if (memory := values[ward.rank]) is not None]
        header = self._header()
        told = () if header is None else reached
        self._offer(header, told)
        self._offer(None, [buddy for buddy in self._buddies if buddy not in told])
        for handle in arriving:
            handle.wait(self._deadline)
        headers = {ward.rank: self._ask(ward, Room(), LONGEST_HEADER) for ward in self._wards}
        if header is not None:
            self._send_where_welcome(header, told)
        for ward in self._wards:
            said, has_it = headers[ward.rank], False
            if said is not None:
                self._receive(said, ward).wait(self._deadline)
                has_it = self._take_in(ward, said, values[ward.rank])
            self._send(torch.tensor([int(has_it)]), ward.member, TO_WARD)
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

    def _take_in(self, ward: Ward, said: torch.Tensor, memory: torch.Tensor | None) -> bool:
        """Keep a ward's copy that has arrived, and return whether it is the expected one.

        said: the header of the copy.
        memory: the bytes of the copy; None if they were not sent.
        """
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

    def _offer(self, values: torch.Tensor | None, buddies: Sequence[int]) -> None:
        """Send these buddies the length of a message, or `NOTHING` if there is no message."""
        for buddy in buddies:
            self._send(torch.tensor([NOTHING if values is None else values.numel()]), buddy, TO_BUDDY)

    def _send_where_welcome(self, values: torch.Tensor, buddies: Sequence[int]) -> tuple[int, ...]:
        """Send values to the buddies that have room for them, and return these buddies."""
        return tuple(buddy for buddy in buddies if self._send_if_welcome(values, buddy))

    def _send_if_welcome(self, values: torch.Tensor, buddy: int) -> bool:
        if not self._answer(buddy):
            self._note(f"member {buddy} has no room for the copy of this member")
            return False
        self.sent_bytes += values.numel()
        self._send(values, buddy, TO_BUDDY)
        return True

    def _answer(self, buddy: int) -> bool:
        """Wait for a buddy's answer and return it."""
        answer = torch.zeros(1, dtype=torch.int64)
        self._way.receive(answer, buddy, TO_WARD).wait(self._deadline)
        return bool(answer.item())

    def _ask(self, ward: Ward, room: Room, most: int | None = None) -> torch.Tensor | None:
        """Receive the length of a ward's message, and answer whether there is room for the message.

        Returns the memory for the message, or None if no message will come.

        most: the greatest length to accept; None for no limit.
        """
        numel = torch.zeros(1, dtype=torch.int64)
        self._receive(numel, ward).wait(self._deadline)
        length = int(numel)
        if length < 0:
            self._note(f"member {ward.member} has no copy to send")
            return None
        memory: torch.Tensor | None = None
        try:
            if most is not None and length > most:
                raise MemoryError(f"a header of {length} bytes was announced, at most {most} are taken")
            memory = room.fit(length)
        except (MemoryError, OSError) as error:
            self._note(f"no room for the copy of member {ward.member}: {error}")
        self._send(torch.tensor([int(memory is not None)]), ward.member, TO_WARD)
        return memory

    def _send(self, values: torch.Tensor, member: int, tag: int) -> None:
        self._under_way.append(self._way.send(values, member, tag))

    def _receive(self, memory: torch.Tensor, ward: Ward) -> Handle:
        return self._way.receive(memory, ward.member, TO_BUDDY)

    @property
    def _way(self) -> Transport:
        if self._transport is None:
            raise TransferError("this round is over")
        return self._transport


GROUP = "buddies"
"""Kind of the process group of all ranks over which a thread sends copies during training."""


class Keeper:
    """One member's service that sends an engine's copies to buddies, and keeps the copies of others, throughout the
    job.

    kept: the copies that this process has.
    world: the world in which copies are taken.
    buddies: the buddies of each rank of that world; () if nothing is copied.
    take_seconds: how long the step waited for the last copy.
    ship_seconds: duration of the last round in seconds.
    sent_bytes: the bytes that this member sent in the last round.
    """

    def __init__(self, engine: EngineCore, kept: Kept) -> None:
        self.engine, self.kept = engine, kept
        self.world: World | None = None
        self.buddies: tuple[tuple[int, ...], ...] = ()
        self.take_seconds, self.ship_seconds, self.sent_bytes = 0.0, 0.0, 0
        self._thread: threading.Thread | None = None
        self._last_error = ""

    @property
    def has_single_holders(self) -> bool:
        """Whether some elements are held by one member only, so that the death of this member would lose them."""
        return has_single_holders(self.engine.vps, self.engine.layout)

    def enter(self, buddies: Mapping[int, tuple[int, ...]]) -> None:
        """Enter the engine's current world.

        buddies: a map from each member to the members that keep its copies.
        """
        self.settle()
        self.world, members = self.engine.world, self.engine.members
        self.buddies = tuple(tuple(map(members.index, buddies[one])) for one in members) if buddies else ()

    def settle(self) -> None:
        """Wait, at most for the usual time-out, until no round is under way in the world's group."""
        if self._thread is not None:
            self._thread.join(self.engine.settings.timeout_seconds)
            self._thread = None

    def begin(self, mark: Mark, world: World) -> Round:
        """Take a copy, and send it while training continues.

        mark: the boundary at which the copy is taken.

        If no state of this engine is held by one member alone, all of its state is copied, because all engines of a
        process are restored together.
        """
        self.settle()
        engine, begin = self.engine, time.perf_counter()
        rank, members, wards = engine.rank, engine.members, wards_of(self.buddies, engine.rank)
        own, rooms = self.kept.begin(mark, len(wards))
        taken: UndigestedCopy | None = None
        try:
            with PROCESS.turn(engine):
                taken = take(engine, own, mark, everything=not self.has_single_holders)
            self.kept.frozen, self.kept.frozen_of = taken.frozen, (engine.layout, rank)
            self._last_error = ""
        except (DynatrainError, RuntimeError, MemoryError, OSError) as error:  # RuntimeError: torch lacks memory
            if str(error) != self._last_error:
                logger.error(
                    "buddies: member %d has no copy of step %d (%s); a death costs what follows the last whole copies",
                    *(members[rank], mark.step, error),
                )
            self._last_error = str(error)
        kept_here = [Ward(members[ward], ward, room) for ward, room in zip(wards, rooms, strict=True)]
        stop = None if world.status is None else partial(_stop_if_lost, world.status)
        way, buddies = GroupTransport(world.group(GROUP), members, stop), [members[each] for each in self.buddies[rank]]
        found = Round(mark, taken, buddies, kept_here, way, self.kept)
        self._thread = start_thread(found.run, "dynatrain-buddies")
        self.take_seconds = time.perf_counter() - begin
        return found

    def see(self, found: Round, is_whole: bool) -> None:
        """Record the result of a round that has ended on all members.

        is_whole: whether the copies of all engines have reached their buddies.
        """
        self.sent_bytes, self.ship_seconds = found.sent_bytes, found.seconds
        if is_whole:
            self.kept.is_whole(found.mark)


def _stop_if_lost(status: GroupStatus) -> None:
    if status.is_lost:
        raise WorldChanged("a member of this world is gone, or a collective of it has failed")
