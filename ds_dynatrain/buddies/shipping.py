"""One round: each member's copy goes to its buddies, over a group of its own and from a thread, while training goes on.

A copy travels so: the ward says of how many bytes it is, the buddy answers whether it has room, and then come the bytes
and, with its own length ahead, the header, which has the digests and so is the last; then the buddy says whether it has
it all. A length of -1 says that there is none. Whatever fails on one member, all others come to the end of the round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ds_dynatrain.adapters.device import start_thread
from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.adapters.world import World
from ds_dynatrain.buddies.placement import wards_of
from ds_dynatrain.buddies.taking import Taken, copy_of, header_of, take
from ds_dynatrain.engine.copies.kept import Kept, Room
from ds_dynatrain.engine.copies.whole import Mark
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import DynatrainError, TransferError, WorldChanged
from ds_dynatrain.plan import has_single_holders
from ds_dynatrain.report import logger
from ds_dynatrain.transfer import GroupTransport, Handle, Transport

TO_BUDDY, TO_WARD = 1, 2
"""Tags."""
NOTHING = -1
LONGEST_HEADER = 1 << 30
SECONDS = 1800.0
"""As long as collectives of training wait: who is later than that has stopped."""


@dataclass(frozen=True)
class Ward:
    """A member whose copy is kept here, its rank, and where."""

    member: int
    rank: int
    room: Room


class Round:
    """A copy of each rank on its way.

    taken: None where this member could not take its own. is_over: the thread has nothing more to do. is_whole: the own
    copy is with its buddies and those of all wards are here. is_void: it does not count, whatever becomes of it.
    """

    def __init__(
        self,
        mark: Mark,
        taken: Taken | None,
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
        """Whether the thread has nothing more to do."""
        return self._over.is_set()

    def run(self) -> None:
        """Carry the round out, in a thread."""
        begin = time.perf_counter()
        try:
            self._carry_out()
        except Exception as error:  # of whatever kind: training goes on, and all learn that it is not whole
            self._note(f"{type(error).__name__}: {error}")
        finally:
            self._transport, self._taken, self._under_way = None, None, []  # which hold the group
            self.seconds = time.perf_counter() - begin
            self.is_whole = not self.error
            self._over.set()

    def _note(self, error: str) -> None:
        """Keep the first error."""
        self.error = self.error or error

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Exchange it all. No send is waited for before the end: it ends only when the other side takes it."""
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
        """Return the header of the own copy, which counts from here on; None if it cannot be described."""
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
        """Keep a ward's copy that has come; return whether it is the one that was due."""
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
        """Tell these buddies how long that is."""
        for buddy in buddies:
            self._send(torch.tensor([NOTHING if values is None else values.numel()]), buddy, TO_BUDDY)

    def _send_where_welcome(self, values: torch.Tensor, buddies: Sequence[int]) -> tuple[int, ...]:
        """Send it to those of these buddies that have room for it, who are given."""
        return tuple(buddy for buddy in buddies if self._send_if_welcome(values, buddy))

    def _send_if_welcome(self, values: torch.Tensor, buddy: int) -> bool:
        if not self._answer(buddy):
            self._note(f"member {buddy} has no room for the copy of this member")
            return False
        self.sent_bytes += values.numel()
        self._send(values, buddy, TO_BUDDY)
        return True

    def _answer(self, buddy: int) -> bool:
        """Return whether a buddy answers that it has room for the copy; wait for the answer."""
        answer = torch.zeros(1, dtype=torch.int64)
        self._way.receive(answer, buddy, TO_WARD).wait(self._deadline)
        return bool(answer.item())

    def _ask(self, ward: Ward, room: Room, most: int | None = None) -> torch.Tensor | None:
        """Hear how long a ward's message is, and answer; return where it will be, or None if nothing comes."""
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
"""The kind of the group of all ranks over which copies go, from a thread beside training."""


class Keeper:
    """What takes and sends the copies of one engine, for the whole job.

    kept: the copies that this process has. world: in which they are taken. buddies: of each rank in it; none where
    nothing is copied. take_seconds, ship_seconds, sent_bytes: of the last copy.
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
        """Whether this member's death could take elements away."""
        return has_single_holders(self.engine.vps, self.engine.layout)

    def enter(self, buddies: Mapping[int, tuple[int, ...]]) -> None:
        """Begin with the present world of the engine. buddies: member -> those who keep its copies."""
        self.settle()
        self.world, members = self.engine.world, self.engine.members
        self.buddies = tuple(tuple(map(members.index, buddies[one])) for one in members) if buddies else ()

    def settle(self) -> None:
        """Wait until no round is under way in the world's group, for the usual time-out."""
        if self._thread is not None:
            self._thread.join(self.engine.settings.timeout_seconds)
            self._thread = None

    def begin(self, mark: Mark, world: World) -> Round:
        """Take a copy, and send it beside training. mark: the present moment.

        What only others have alone is copied whole here: all engines go back together.
        """
        self.settle()
        engine, begin = self.engine, time.perf_counter()
        rank, members, wards = engine.rank, engine.members, wards_of(self.buddies, engine.rank)
        own, rooms = self.kept.begin(mark, len(wards))
        taken: Taken | None = None
        try:
            with PROCESS.turn(engine):
                taken = take(engine, own, mark, everything=not self.has_single_holders)
            self.kept.frozen, self.kept.frozen_of = taken.frozen, (engine.layout, rank)
            self._last_error = ""
        except (DynatrainError, RuntimeError, MemoryError, OSError) as error:  # torch has no memory: RuntimeError
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
        """Note a round that is over on all members. is_whole: the copies of all engines are where they belong."""
        self.sent_bytes, self.ship_seconds = found.sent_bytes, found.seconds
        if is_whole:
            self.kept.is_whole(found.mark)


def _stop_if_lost(status: GroupStatus) -> None:
    if status.is_lost:
        raise WorldChanged("a member of this world is gone, or a collective of it has failed")
