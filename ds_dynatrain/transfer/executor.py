"""The executor, which carries out a member's moves of state in a switch. Every wait has a timeout.

`ReadyPlan` prepares all copies and messages while training runs. It identifies buffers by name, because their addresses
are not known yet. During the pause of the switch only the copies themselves remain to be done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.plan import Exchange, MemberPlan, StandInPlan, split
from ds_dynatrain.transfer.batched import BatchedMoves, Batches, Batching, Bundles, DeviceLink
from ds_dynatrain.transfer.pulling import Pull, Pulling, Sharing
from ds_dynatrain.transfer.regions import Buffers, MoveRegions, Regions, check_disjoint, copy_matrix, pairs
from ds_dynatrain.transfer.series import Matrix
from ds_dynatrain.transfer.stream import SLOTS, MessageOutline, Staging, Stream
from ds_dynatrain.transfer.transport import MESSAGE_BYTES, Handle, Transport, call_beside

MINIMUM_BUDGET_BYTES = 64 * 1024
CHUNK_BYTES = 4 * 1024 * 1024
"""Maximum size of a staged message, in bytes. With all slots of both directions in use, staging takes 32 MiB."""


@dataclass(frozen=True)
class Phase:
    """A member's exchanges with other members that can run in any order.

    exchanges: (peer, sent messages, received messages), excluding the moves in `pulls` and `batches`.
    pulls: this member's reads of other members' accelerator memory.
    batches: this member's batches of moves through the collectives library.
    """

    exchanges: list[tuple[int, MessageOutline, MessageOutline]]
    pulls: list[Pull]
    batches: Batches

    @staticmethod
    def of(
        exchanges: Sequence[Exchange],
        chunk: int,
        longest: int,
        sharing: Sharing | None,
        batching: Batching | None,
        is_relayed: bool = False,
    ) -> Phase:
        """Prepare exchanges: decide which moves become messages, reads of accelerator memory, or batches.

        chunk, longest: as in `MessageOutline.of`.
        is_relayed: whether the exchanges pass received data on to other members of the node, so that they read target
            buffers.
        """
        pulls, batches = list[Exchange](), list[Exchange]()
        if sharing is not None:
            exchanges, pulls = split(exchanges, sharing.members, sharing.after if is_relayed else sharing.kinds)
        if batching is not None:
            exchanges, batches = split(exchanges, batching.members, batching.kinds, batching.kinds)
        outlines = []
        for each in exchanges:
            sends = MessageOutline.of(MoveRegions.of(each.sends, "source"), chunk, longest)
            outlines.append(
                (each.peer, sends, MessageOutline.of(MoveRegions.of(each.receives, "target"), chunk, longest))
            )
        found = () if batching is None else (Bundles.of(each, batching.bundle_bytes) for each in batches)
        return Phase(outlines, [Pull.of(each) for each in pulls], Batches.of(found))


@dataclass(frozen=True)
class ReadyPlan:
    """A member's plan of moves with all the details that `execute` needs.

    plan: the member's plan.
    on_host: whether all buffers of all members are in host memory.
    local: regions that moves within the member read, and regions that they write.
    copies: these local moves as pairs of matrices of bytes.
    phases: the exchanges that read source buffers and then, if there are any, the relays, which read target buffers.
    at_once: the number of exchanges that may run at the same time.
    derived: regions that casts read, and regions that they write; all of them are in target buffers.
    casts: the casts as pairs of matrices of elements.
    staging: memory for packed messages, already touched.
    bytes_sent: bytes that this member sends to other members by any means.
    sharing: the settings for reads of other members' accelerator memory.
    """

    plan: MemberPlan
    on_host: bool
    local: tuple[MoveRegions, MoveRegions]
    copies: list[tuple[Matrix, Matrix]]
    phases: list[Phase]
    at_once: int
    derived: tuple[MoveRegions, MoveRegions]
    casts: list[tuple[Matrix, Matrix]]
    staging: Staging
    bytes_sent: int
    sharing: Sharing | None

    @staticmethod
    def of(
        plan: MemberPlan,
        budget_bytes: int,
        on_host: bool = True,
        sharing: Sharing | None = None,
        batching: Batching | None = None,
    ) -> ReadyPlan:
        """Prepare a plan for buffers whose addresses are not known yet.

        budget_bytes: maximum number of bytes of staging memory.
        on_host: whether all buffers of all members are in host memory.
        sharing: the settings for reads of other members' accelerator memory; None for no such reads.
        batching: the settings for moves through the collectives library; None for no such moves.

        Raises TransferError if the budget is too small.
        """
        if budget_bytes < MINIMUM_BUDGET_BYTES:
            raise TransferError(
                f"a budget of {budget_bytes} bytes is below the least of {MINIMUM_BUDGET_BYTES}: raise it"
            )
        chunk = min(CHUNK_BYTES, budget_bytes // (2 * SLOTS))
        longest = MESSAGE_BYTES if on_host else chunk  # all messages of an accelerator are staged
        local = MoveRegions.of(plan.local, "source"), MoveRegions.of(plan.local, "target")
        derived = MoveRegions.of(plan.derived, "source"), MoveRegions.of(plan.derived, "target")
        phases = [Phase.of(plan.rounds, chunk, longest, sharing, batching)]
        if plan.relays:
            phases.append(Phase.of(plan.relays, chunk, longest, sharing, batching, is_relayed=True))
        slot, slots, at_once = 0, 0, max(1, budget_bytes // (2 * SLOTS * chunk))
        for phase in phases:
            used = [sends.slots + receives.slots for _, sends, receives in phase.exchanges]
            slots = max([slots, *(sum(used[at : at + at_once]) for at in range(len(used)))])
            slot = max([slot, *(outline.longest for _, *both in phase.exchanges for outline in both)])
        staging = Staging(min(chunk, slot), is_pinned=not on_host)
        staging.reserve(slots)
        bytes_sent = sum(each.sends.nbytes for each in plan.exchanges)
        return ReadyPlan(
            plan,
            on_host,
            local,
            pairs(*local),
            phases,
            at_once,
            derived,
            _casts(*derived),
            staging,
            bytes_sent,
            sharing,
        )


def _casts(read: MoveRegions, written: MoveRegions) -> list[tuple[Matrix, Matrix]]:
    """Return casts as pairs of matrices (read, written) whose positions and lengths are counted in elements instead of
    bytes."""
    found = list[tuple[Matrix, Matrix]]()
    for each in pairs(read, written):
        sizes = read.keys[each[0].which][2], written.keys[each[1].which][2]
        mine, others = (
            matrix._replace(begin=matrix.begin // size, step=matrix.step // size, length=matrix.length // size)
            for matrix, size in zip(each, sizes, strict=True)
        )
        found.append((mine, others))
    return found


TAG = 1
"""Tag of all messages. One tag suffices: two members share only one exchange in a plan, and messages with the same tag
keep their order."""


@dataclass(frozen=True)
class TransferStats:
    """Bytes that a member moved in a switch, and the duration of each phase.

    bytes_sent: bytes that this member sent to other members by any means.
    bytes_local: bytes copied within the member.
    bytes_in_place: bytes that did not have to move.
    staging_peak: the largest number of bytes of staging memory in use at once.
    seconds_local: duration of the local copies.
    seconds_exchange: duration of the exchanges with other members.
    seconds_derived: duration of the casts.
    """

    bytes_sent: int
    bytes_local: int
    bytes_in_place: int
    staging_peak: int
    seconds_local: float
    seconds_exchange: float
    seconds_derived: float


def execute(
    ready: ReadyPlan,
    source: Buffers,
    target: Buffers,
    transport: Transport,
    deadline_seconds: float,
    link: DeviceLink | None = None,
) -> TransferStats:
    """Fill a member's target buffers according to its plan.

    The call first runs the local moves, then each phase of the plan, and finally the derived moves (casts within target
    buffers). A phase consists of reads from other accelerators, batches between accelerators, and exchanges. Exchanges
    are started as far ahead as the memory budget allows, and finished in order. The first unfinished exchange of a
    member is also the first unfinished one of its peer, so members cannot deadlock.

    source: the buffers before the switch, keyed by (state kind, buffer name).
    target: the same for the buffers after the switch.
    deadline_seconds: limit for the whole call.
    link: needed if the plan has batches.

    All members must have prepared their plans for the same budget. A target buffer may share memory with a source
    buffer only where elements keep their addresses; any other overlap is refused, so source buffers are unchanged until
    the derived moves. Elements that no move writes (padding) are left unchanged.

    Raises TransferError before the first byte moves if the buffers do not fit the plan. Raises TransferError if a
    connection fails, and MemberMissing when the deadline passes. After an error the target buffers and the transport
    are unusable.
    """
    begin = time.monotonic()
    deadline = begin + deadline_seconds
    for (kind, name), held in chain(source.items(), target.items()) if ready.on_host else ():
        if held.device.type != "cpu":
            raise TransferError(
                f"{kind} in {tuple(name)} lies on {held.device}, and the plan was made for members with host memory "
                "alone: make it with on_host=False on all of them"
            )
    read, written = ready.local[0].among(source), ready.local[1].among(target)
    phases = [
        _Running.of(ready, phase, held, target, transport, link)
        for phase, held in zip(ready.phases, (source, target), strict=False)
    ]
    for places in ready.derived:
        places.among(target)
    moved = np.flatnonzero((read.addresses() != written.addresses()) | (read.step != written.step))
    into = [regions for phase in phases for regions in phase.into]
    check_disjoint([read, *phases[0].lent], [written.select(moved), *into])
    phases[0].start(ready.at_once)  # overlap communication with local copies
    is_all = len(moved) == len(read.begin)
    read.copy_to(written, ready.copies if is_all else pairs(*ready.local, moved))
    local_done = time.monotonic()
    for number, phase in enumerate(phases):
        if number:
            phase.start(ready.at_once)
        phase.run(ready.at_once, deadline)
    exchange_done = time.monotonic()
    for out_of, to in ready.casts:
        origin, place = ready.derived[0].keys[out_of.which], ready.derived[1].keys[to.which]
        copy_matrix(target[origin[:2]].detach(), out_of, target[place[:2]].detach(), to)
    derived_done = time.monotonic()
    nbytes = read.length * read.number
    bytes_moved = int(nbytes[moved].sum())
    return TransferStats(
        bytes_sent=ready.bytes_sent,
        bytes_local=bytes_moved,
        bytes_in_place=int(nbytes.sum()) - bytes_moved,
        staging_peak=ready.staging.peak + max(phase.batches.staging_bytes for phase in ready.phases),
        seconds_local=local_done - begin,
        seconds_exchange=exchange_done - local_done,
        seconds_derived=derived_done - exchange_done,
    )


@dataclass(frozen=True)
class _Running:
    """A phase of the plan during its execution, bound to buffers in memory.

    streams: for each exchange, the stream of received messages and the stream of sent ones. Receives are started before
        sends, so that buffers are ready for the peers' data.
    others: reads from other accelerators, and batches between accelerators.
    lent: the regions that the phase reads.
    into: the regions that the phase writes.
    """

    streams: list[tuple[Stream, Stream]]
    others: list[Pulling | BatchedMoves]
    lent: list[Regions]
    into: list[Regions]

    @staticmethod
    def of(
        ready: ReadyPlan, phase: Phase, source: Buffers, target: Buffers, transport: Transport, link: DeviceLink | None
    ) -> _Running:
        """Bind one phase of the plan to buffers in memory. No message is started yet.

        source: the buffers that the phase reads.
        target: the buffers that the phase writes.
        """
        streams, others, lent, into = list[tuple[Stream, Stream]](), list[Pulling | BatchedMoves](), [], []
        for peer, sends, receives in phase.exchanges:
            lent.append(sends.places.among(source))
            into.append(receives.places.among(target))
            incoming = Stream(transport, peer, TAG, False, into[-1], receives.parcels, ready.staging)
            streams.append((incoming, Stream(transport, peer, TAG, True, lent[-1], sends.parcels, ready.staging)))
        if ready.sharing is not None and phase.pulls:
            others.append(Pulling(ready.sharing.memory, phase.pulls, source, target, transport))
        if phase.batches.exchanges:
            if link is None:
                peers = [each.peer for each in phase.batches.exchanges]
                raise TransferError(
                    f"moves from and to members {peers} go by a link between devices, and there is none"
                )
            others.append(BatchedMoves(phase.batches, source, target, transport, link))
        for other in others:
            lent, into = lent + other.lent, into + other.into
        return _Running(streams, others, lent, into)

    def start(self, at_once: int) -> None:
        """Start the first `at_once` exchanges, and all reads and batches between accelerators."""
        for other in self.others:
            other.start()
        for stream in chain.from_iterable(self.streams[:at_once]):
            stream.advance()

    def run(self, at_once: int, deadline: float) -> None:
        """Finish the phase: complete its exchanges in order, with up to `at_once` of them in progress at a time."""
        for other in self.others:
            other.run(deadline)
        for number, (incoming, outgoing) in enumerate(self.streams):
            while not (incoming.is_done and outgoing.is_done):
                incoming.advance()
                outgoing.advance()
                incoming.finish(deadline)
                outgoing.finish(deadline)
            for stream in chain.from_iterable(self.streams[number + at_once : number + at_once + 1]):
                stream.advance()


TAGS = 256
"""Size of the tag range of each absent member, so that messages of different members never share a tag."""


@dataclass(frozen=True)
class ActingTransport:
    """A transport for a process that may send messages in the name of an absent member.

    transport: the transport that carries the messages.
    member: the member in whose name messages are sent: this process's own member, or one that it stands in for.
    stand_ins: a map from each absent member to the member that stands in for it; the same on all members.
    """

    transport: Transport
    member: int
    stand_ins: Mapping[int, int]

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self.transport.send(tensor, member, self._tag(self.member, tag))

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self.transport.receive(tensor, self.stand_ins.get(member, member), self._tag(member, tag))

    def _tag(self, sender: int, tag: int) -> int:
        if sender not in self.stand_ins:
            return tag
        return tag + TAGS * (1 + sorted(self.stand_ins).index(sender))


def execute_standing_in(
    plan: StandInPlan,
    sources: Mapping[int, Buffers],
    target: Buffers,
    transport: Transport,
    stand_ins: Mapping[int, int],
    deadline_seconds: float,
    budget_bytes: int,
    on_host: bool = True,
) -> None:
    """Execute the plans of a member and of the absent members that it stands in for.

    sources: the source buffers of each of these members; the member itself may be left out if it has no state.
    target: the target buffers of the member itself.
    stand_ins: a map from each absent member to the member that stands in for it; the same on all members.

    The buffers of absent members must be in host memory. Raises the errors of `execute`.
    """
    member, deadline = plan.own.member, time.monotonic() + deadline_seconds

    def carry_out(part: MemberPlan, source: Buffers, into: Buffers, way: Transport) -> None:
        execute(ReadyPlan.of(part, budget_bytes, on_host), source, into, way, deadline_seconds)

    sendings = []
    for one, part in plan.absent.items():
        away = replace(part, local=part.local.select(slice(0, 0)))  # without moves to the stand-in itself
        send = partial(carry_out, away, sources[one], {}, ActingTransport(transport, one, stand_ins))
        sendings.append((part, call_beside(send, f"dynatrain-stand-in-{one}")))
    mine = ActingTransport(transport, member, stand_ins)
    for one, part in plan.absent.items():
        carry_out(replace(part, rounds=()), sources[one], target, mine)
    carry_out(plan.own, sources.get(member, {}), target, mine)
    for part, sending in sendings:
        if not futures.wait([sending], max(0.0, deadline - time.monotonic())).done:
            peers = [each.peer for each in part.rounds]
            raise MemberMissing(f"sends for member {part.member}", peers, deadline_seconds)
        sending.result()
