"""Buddies that make each other's steps: no step is lost, whoever dies at whatever instant.

| in a step | this rank | its replicas | after a death it can give |
|---|---|---|---|
| forward, backward, gradients on their way to buddies, norm | as before it | as before it | the step before |
| it knows what the step does, and waits for all to know | as before it | as before it, gradients in hand | both |
| all know: wards' masters change, then its own, weights are gathered | as after it | as after it | this step |

Who is in the third line has seen all in the second, where each has its wards' gradients: so no survivor is in the first
line while another one is in the third, and there is one step to which all living can go. Nobody has returned from a
step before all were in the third line of it, or in the second: so that step is lost for nobody. Who waits for all and
learns that somebody is dead does not know whether all others passed: it puts aside what is before the step and makes
the step. From the second line on a collective that fails does so at the end of the step (`finish`): masters, counters
and the scheduler are then as after it, and the weights, which are not gathered, come from the masters of all.

What a replica holds is proved where digests of ward and replica are compared (`verify`), and by nothing else: digests
of the copies that are given are made of what is there then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.adapters.replaying import Unscale, reduced_gradients, watched_step
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.watched import GroupStatus, is_lost_peer
from ds_dynatrain.engine.buddies.copy import Copy, Mark, copied, described, digests_of
from ds_dynatrain.engine.buddies.message import bytes_of_said, said_in
from ds_dynatrain.engine.buddies.replica import Replica, Said, buffers_of
from ds_dynatrain.engine.buddies.shipping import LONGEST_HEADER, NOTHING, SECONDS
from ds_dynatrain.engine.buddies.taking import own_part, said_by
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import DynatrainError, TransferError, WorldChanged
from ds_dynatrain.report import logger
from ds_dynatrain.space import MASTER
from ds_dynatrain.transfer import Handle, Transport

GRADIENT, WORDS, DIGESTS = 3, 4, 5
"""Tags; lower ones are those of copies."""


@dataclass(frozen=True)
class _State:
    """What a copy is made of."""

    mark: Mark
    rank: int
    buffers: Buffers
    said: Said

    def apart(self) -> _State:
        """In memory of its own."""
        said, tensors = self.said
        buffers = {key: held.clone() for key, held in self.buffers.items()}
        return replace(self, buffers=buffers, said=(said, [each.clone() for each in tensors]))


class Replay:
    """Of one engine, from a moment at which all copies are whole to the end of the world, or till something is wrong.

    mark: that moment. replicas: made of it. group: of all ranks, on the main thread; status: of the world's groups.
    is_sound: false, on all alike, once a replica somewhere is of no use.
    """

    def __init__(
        self,
        engine: EngineCore,
        mark: Mark,
        buddy: int,
        replicas: Sequence[Replica],
        transport: Transport,
        group: td.ProcessGroup,
        status: GroupStatus,
    ) -> None:
        self.mark, self.replicas, self.is_sound = mark, replicas, True
        self.ship_seconds, self.seconds, self.sent_bytes = 0.0, 0.0, 0
        self._engine, self._buddy, self._transport, self._group, self._status = engine, buddy, transport, group, status
        self._rank = engine.rank
        self._lost: RuntimeError | None = None
        self._is_past = False
        """Whether the step that is being made is decided."""
        self._said: Said | None = None
        self._before: list[_State] = []
        self._aside: list[_State] | None = None
        self._copies: list[Copy] | None = None
        self._outgoing: list[torch.Tensor] = []
        held = engine.host.state_buffers()[0]
        self._lengths = [len(held[MASTER, name]) for name in buffers_of(engine)]
        """Of own masters; nothing of a group that other pipeline stages have."""
        self.note()

    # ---- a step ------------------------------------------------------------------------------------------------------

    @contextmanager
    def watched_step(self) -> Iterator[None]:
        """Around the optimizer's step. If it raises, collectives fail from there on when they do."""
        try:
            with watched_step(self._engine.host.optimizer, self):
                yield
        except BaseException:
            self._is_past = self._status.is_deferred = False
            raise

    def reduced(self) -> None:
        """The own gradients go to the buddy, those of the wards come; WorldChanged if somebody is gone."""
        begin, self._copies = time.perf_counter(), None
        mine, words = self._gradients(), self._words()
        try:
            self._exchange(mine, words)
        except TransferError as error:
            raise WorldChanged(f"a buddy or a ward is gone: {error}") from error
        self.ship_seconds = self.seconds = time.perf_counter() - begin

    def decided(self, unscale: Unscale | None) -> None:
        """All have what this step takes, on themselves and on their wards: the replicas make it."""
        begin = time.perf_counter()
        try:
            sound = torch.tensor([int(self._said is not None and all(not each.error for each in self.replicas))])
            td.all_reduce(sound, td.ReduceOp.MIN, group=self._group)
            self.is_sound = bool(sound.item())
        except RuntimeError as error:
            if not isinstance(error, WorldChanged) and not is_lost_peer(error):
                raise
            self._before = [each.apart() for each in self._states()]
            self._lost = error
        self._is_past, self._status.is_deferred = True, True
        for replica in self.replicas:
            try:
                if not replica.error:
                    replica.step(unscale)
            except (RuntimeError, MemoryError) as error:  # torch has no memory: RuntimeError
                replica.error = f"{type(error).__name__}: {error}"
                logger.error(
                    "buddies: step %d of member %d could not be replayed (%s); copies are taken anew",
                    *(self.mark.step + 1, replica.member, replica.error),
                )
        self.mark, self._said = replace(self.mark, step=self.mark.step + 1), None
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """The step is over, with its counters and the scheduler. WorldChanged if a collective has failed since it was
        decided: the weights are of no use then.
        """
        if not self._is_past:
            return
        self._is_past = self._status.is_deferred = False
        failure = self._lost or self._status.failure
        if failure is not None:
            self._engine.is_stepping = True
            raise WorldChanged(f"a member of this world is gone; the step that was made is kept ({failure})")

    def note(self) -> None:
        """At a boundary: what the own copy would say; nothing where it cannot be said."""
        tensors: list[torch.Tensor] = []
        try:
            said = said_by(self._engine, *self._engine.host.state_buffers(), tensors)
            self._said = said, [each.clone() for each in tensors]
        except (DynatrainError, TypeError, ValueError) as error:
            self._said = None
            logger.error(
                "buddies: what rank %d has at step %d cannot be kept (%s); copies are taken anew",
                *(self._rank, self.mark.step, error),
            )

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def _exchange(self, mine: Sequence[torch.Tensor], words: torch.Tensor | None) -> None:
        deadline, under_way = time.monotonic() + SECONDS, list[Handle]()
        asked, dtypes = list[tuple[Replica, torch.Tensor, Handle]](), [each.dtype for each in mine]
        for replica in self.replicas:
            length, member = torch.zeros(1, dtype=torch.int64), replica.member
            asked.append((replica, length, self._transport.receive(length, member, WORDS)))
            under_way += [self._transport.receive(each, member, GRADIENT) for each in replica.room(dtypes) if len(each)]
        length = torch.tensor([NOTHING if words is None else len(words)])
        for each in (length,) if words is None else (length, words):
            under_way.append(self._transport.send(each, self._buddy, WORDS))
        under_way += [self._transport.send(each, self._buddy, GRADIENT) for each in mine if len(each)]
        heard = []
        for replica, length, handle in asked:
            handle.wait(deadline)
            heard.append(self._hear(replica, int(length), deadline))
        for handle in under_way:
            handle.wait(deadline)
        for replica, said in zip(self.replicas, heard, strict=True):
            self._take_in(replica, said)
        self.sent_bytes = sum(each.numel() * each.element_size() for each in mine)

    def _gradients(self) -> list[torch.Tensor]:
        """The own ones, flat, as long as the masters."""
        parts = reduced_gradients(self._engine.host.optimizer)
        dtypes = [part[0].dtype for part in parts]
        if [each.dtype for each in self._outgoing] != dtypes:
            made = zip(self._lengths, dtypes, strict=True)
            self._outgoing = [torch.zeros(length, dtype=dtype) for length, dtype in made]
        pairs = zip(parts, self._outgoing, strict=True)
        return [_joined(part, there) if len(there) else there for part, there in pairs]

    def _words(self) -> torch.Tensor | None:
        """What the copy of this rank would say after the step, as far as it is this rank's own."""
        tensors: list[torch.Tensor] = []
        try:
            return bytes_of_said(own_part(self._engine, tensors), tensors)
        except (DynatrainError, TypeError, ValueError) as error:
            logger.error(
                "buddies: what belongs to rank %d after step %d cannot travel (%s); copies are taken anew",
                *(self._rank, self.mark.step, error),
            )
            return None

    def _hear(self, replica: Replica, length: int, deadline: float) -> torch.Tensor | None:
        if not 0 <= length <= LONGEST_HEADER:
            return None
        memory = torch.zeros(length, dtype=torch.uint8)
        self._transport.receive(memory, replica.member, WORDS).wait(deadline)
        return memory

    def _take_in(self, replica: Replica, words: torch.Tensor | None) -> None:
        try:
            if words is None:
                raise TransferError("it sent none")
            replica.said_next = said_in(words)
        except TransferError as error:
            replica.error = f"what member {replica.member} says of itself is not here: {error}"
            logger.error("buddies: %s", replica.error)

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def verify(self) -> bool:
        """Whether each replica is what its ward is, element by element; on all alike. Between two steps."""
        deadline, engine = time.monotonic() + SECONDS, self._engine
        own = copied(engine.vps, self.mark.layout, engine.host.state_buffers()[0])
        mine, found = self._digests(self._rank, own), True
        theirs = [self._digests(each.rank, each.buffers()) for each in self.replicas]
        said = [torch.zeros_like(each) for each in theirs]
        pairs = zip(said, self.replicas, strict=True)
        try:
            handles = [self._transport.receive(each, replica.member, DIGESTS) for each, replica in pairs]
            handles.append(self._transport.send(mine, self._buddy, DIGESTS))
            for handle in handles:
                handle.wait(deadline)
        except TransferError as error:
            raise WorldChanged(f"a buddy or a ward is gone: {error}") from error
        for replica, here, there in zip(self.replicas, theirs, said, strict=True):
            if not torch.equal(here, there):
                found = False
                where = f"{int((here != there).sum())} of {len(here)} digests"
                logger.error(
                    "buddies: after step %d the replica of member %d here is not what that one is: %s differ; "
                    "copies are taken anew",
                    *(self.mark.step, replica.member, where),
                )
        is_equal = torch.tensor([int(found)])
        td.all_reduce(is_equal, td.ReduceOp.MIN, group=self._group)
        return bool(is_equal.item())

    def _digests(self, rank: int, buffers: Buffers) -> torch.Tensor:
        """Of what has elements: where a stage trains nothing a ward has moments without any, and a replica none."""
        held = {key: buffer for key, buffer in buffers.items() if len(buffer)}
        found = digests_of(self._engine.vps, self.mark.layout, rank, held)
        sums = [found[kind] for kind in sorted(found)] or [np.zeros(1, np.uint64)]
        return torch.from_numpy(np.concatenate(sums).view(np.int64))

    # ---- after a death -----------------------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Of this rank and its wards, at each moment that can be given; they count until the next step begins."""
        if self._copies is None:
            states = self._states() if self._aside is None else self._aside
            vps = self._engine.vps
            self._copies = [
                described(vps, each.mark, each.rank, each.buffers, *each.said) for each in (*self._before, *states)
            ]
        return self._copies

    def put_aside(self) -> None:
        """The engine's memory is about to be used by others: keep what it holds, until copies are asked for."""
        if self._copies is None and self._aside is None:
            states = self._states()
            self._aside = [each.apart() if each.rank == self._rank else each for each in states]

    def _states(self) -> list[_State]:
        """At the moment of the mark."""
        engine = self._engine
        if engine.global_steps != self.mark.step:  # it has made steps of which nobody was told
            return []
        if self._said is None:  # not at the boundary yet
            self.note()
        own = self._said
        if own is None:
            return []
        buffers = copied(engine.vps, self.mark.layout, engine.host.state_buffers()[0])
        found = [_State(self.mark, self._rank, buffers, own)]
        for replica in self.replicas:
            if not replica.error and replica.said is not None:
                found.append(_State(self.mark, replica.rank, replica.buffers(), _whole(replica.said, own[0])))
        return found

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        sending = sum(each.numel() * each.element_size() for each in self._outgoing)
        return sending + sum(replica.nbytes for replica in self.replicas)


def _whole(said: Said, own: dict[str, Any]) -> Said:
    """What a ward says, with what is the same on all ranks."""
    words, tensors = said
    rest = {**words["rest"], "grad_norm": own["rest"]["grad_norm"]}
    return {**own, **words, "rest": rest}, tensors


def _joined(parts: Sequence[torch.Tensor], there: torch.Tensor) -> torch.Tensor:
    """What lies end to end, with zeros to the length of `there`, which is taken where it does not lie so in memory."""
    first, numel = parts[0], sum(map(len, parts))
    ends = [part.data_ptr() + len(part) * part.element_size() for part in parts]
    memory = {part.untyped_storage().data_ptr() for part in parts}
    is_one = len(memory) == 1 and all(part.data_ptr() == end for part, end in zip(parts[1:], ends, strict=False))
    if is_one and numel == len(there) and all(part.is_contiguous() for part in parts):
        return first if len(parts) == 1 else first.as_strided((numel,), (1,), first.storage_offset())
    at = 0
    for part in parts:
        there[at : at + len(part)].copy_(part)
        at += len(part)
    there[at:].zero_()
    return there
