"""Preparation of a switch while training continues: process groups, plan, modules and memory for the next world.

The transports of bytes between any two members are chosen here as well, in the same way at both ends. Members on one
machine read each other's memory if the system permits it, including accelerator memory. Other accelerators use the
library of their collectives. All remaining bytes are sent by gloo, over a process group made for the transfer.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups.communicators import (
    Communicator,
    CommunicatorLink,
    Connections,
    can_send_between_devices,
)
from ds_dynatrain.adapters.groups.device import HOST, compute_device, device_backend, is_accelerated, start_thread
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop
from ds_dynatrain.adapters.model.shaper import Made
from ds_dynatrain.adapters.zero.state import HERE, Buffers, Memory, is_one_memory, provide, reusable, zeros
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.errors import DynatrainError, SwitchFailed, SwitchRefused
from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session, first_and_other
from ds_dynatrain.plan import Assignment, Cost, MemberPlan, SwitchPlan, assign_slots, peak_bytes, plan_switch, split
from ds_dynatrain.reshard.certificate import DigestSide
from ds_dynatrain.space import MASTER, BufferId, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.transfer import (
    Batching,
    GroupTransport,
    Neighbors,
    ReadyPlan,
    RoutedTransport,
    Sharing,
    TransferStats,
    Transport,
    allocate,
    device_memory,
    prefault,
)
from ds_dynatrain.transfer.neighbors import machine, permit_readers

POLL_SECONDS = 0.05
"""Time between two polls; it can be long, because training continues meanwhile."""


@dataclass
class Ways:
    """The transports between one member and all others in a switch, in both directions.

    way: the setting `dynatrain.transport`.
    stop: called in every wait; raises if the switch will not take place.
    neighbors: members on this machine whose memory can be read; None until they are found.
    batching: the settings for moves through the library of the accelerators' collectives; None if there are no such
        moves.
    """

    way: str
    control: Control
    proposal: Proposal
    stop: Callable[[], None]
    neighbors: Neighbors | None = None
    batching: Batching | None = None
    _machine: str = ""
    """Key, in the key-value store, of the list of members on this machine."""
    _on_machine: Sequence[int] = ()
    """Members on this machine, this one included."""

    def announce(self) -> None:
        """Post which machine this member is on. All members must do so before any of them calls `meet`."""
        if self.way != "gloo":
            self._machine = f"machine/{self.proposal.generation}/{machine()}"
            self.control.add_to_list(self._machine, self.control.member)

    def meet(self) -> None:
        """Find the members on this machine whose memory can be read, and connect to them.

        Raises SwitchRefused if the user asked for memory reads between all members and some cannot read each other's
        memory.
        """
        if self.way == "gloo":
            return
        self._on_machine = self.control.read_list(self._machine)
        member, device = self.control.member, compute_device()
        read, seconds = None if self.way == "nccl" else device, self.control.timeout_seconds
        self.neighbors = Neighbors.meet(member, self._share, seconds, self.stop, read)
        far = sorted(self._far)
        if self.way == "ipc" and far:
            self.end()
            raise SwitchRefused(
                f'dynatrain.transport is "ipc", and member {member} on {device} and members {far} cannot read each '
                "other's accelerator memory",
                'set it to "auto", which takes other ways between these',
            )

    def agree_on_batching(
        self, plan: MemberPlan, kinds: frozenset[str], budget_bytes: int, session: Session, world: World
    ) -> None:
        """Decide, together with all members, which moves use the library of the accelerators' collectives.

        These are the moves of state on accelerators between members that do not read each other's memory. If the user
        asked for another transport, there are none. Raises SwitchRefused if the user asked for this library and a
        member has none.

        plan: this member's moves.
        kinds: the state kinds that are on accelerators before and after the switch.
        world: the next world; its `moves_by_device` is set to whether there are such moves.
        """
        if self.way == "nccl" and not can_send_between_devices():
            device = compute_device()
            has = "which has none" if device == HOST else f"whose library is {device_backend()}"
            raise SwitchRefused(
                f'dynatrain.transport is "nccl", and member {self.control.member} computes on {device}, {has}',
                'set it to "auto", which takes what there is',
            )
        if self.way not in ("auto", "nccl") or not can_send_between_devices():
            return
        mine = max(len(split(phase, self._far, kinds, kinds)[1]) for phase in (plan.rounds, plan.relays))
        most = session.reduce("batches", mine, max, doing="finding the way between devices")
        world.moves_by_device = most > 0
        self.batching = Batching(self._far, kinds, most, budget_bytes) if most else None

    def sharing(self, kinds: frozenset[str], after: frozenset[str]) -> Sharing | None:
        """Return the settings for reads of other members' accelerator memory; None if this member reads from none.

        kinds: the state kinds whose buffers are on accelerators before the switch.
        after: the state kinds whose buffers are on accelerators after it.
        """
        memory, lenders = device_memory(compute_device()), self._lenders
        return Sharing(memory, lenders, kinds, after) if memory is not None and lenders else None

    def transport(self, world: World | None) -> Transport:
        """Return the transport for messages through host memory between all members of both worlds.

        world: the next world.

        Raises SwitchFailed if there is no next world.
        """
        if world is None or world.transfer is None:
            raise SwitchFailed("the groups of the next world are not there")
        stop = None if self.control.watch is None else self.stop
        group = GroupTransport(world.transfer, world.transfer_members, stop)
        if self.neighbors is None:
            return group
        permit_readers()  # another engine of this process may have revoked it
        return RoutedTransport(self.neighbors, group)

    def link(self, world: World | None, stop: Callable[[], None]) -> CommunicatorLink | None:
        """Return the link for messages between the accelerators of all members of both worlds; None if it is not
        connected, or if no moves use it.

        world: the next world.
        """
        if self.batching is None or world is None or world.moving is None:
            return None
        return CommunicatorLink(world.moving, self.control.member, world.transfer_members, stop)

    def may_lend(self, old: World | None) -> Communicator | None:
        """Return the communicator of the old world over which accelerators may move state in the switch; None if there
        is none.

        All members of the old world get the same answer, even before the moves begin. The new world uses the
        communicator as well, unless it also connects members that leave. In an elastic job no communicator is reused.
        """
        if self.way not in ("auto", "nccl") or not can_send_between_devices() or old is None or old.status is not None:
            return None
        return old.communicators.get(("", self.proposal.union))

    def end(self) -> None:
        """Stop letting other members read this member's memory."""
        if self.neighbors is not None:
            self.neighbors.close()
            self.neighbors = None

    @property
    def _far(self) -> frozenset[int]:
        """Other members with which this member does not share accelerator memory."""
        return frozenset(self.proposal.union) - {self.control.member} - self._lenders

    @property
    def _lenders(self) -> frozenset[int]:
        """Members with which this member shares accelerator memory: each can read the other's."""
        return frozenset() if self.neighbors is None else self.neighbors.lenders

    def _share(self, what: str, record: Any) -> Mapping[int, Any]:
        """Post a record for all members on this machine; return the records of all of them, keyed by member.

        what: a name for the records.
        """
        board, key = self.control, f"{what}/{self.proposal.generation}"
        board.post(f"{key}/{board.member}", record)
        keys = {member: f"{key}/{member}" for member in self._on_machine}
        return board.wait(keys, "finding neighbors", stop=self.stop, longest=POLL_SECONDS, is_there=False)


LIMITS = (*map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)), "can't allocate memory")
"""Fragments of error messages (also of torch and gloo) about a lack of open files or memory."""
ABANDON_SECONDS = 5.0
MOST_ERRORS = 4
"""Maximum number of members whose errors are reported to all."""
SIDES_SHARE = 2
"""Divisor of the staging budget: tables for digests that are made before the pause take at most budget /
SIDES_SHARE."""


def nothing() -> None:
    """Do nothing; the default of a preparation's hooks."""


@dataclass
class Preparation:
    """Preparation of a switch on one member. `start` runs it in a thread, and `join` waits for the thread.

    board: the key-value store in which the switch is negotiated.
    control: the same store over another connection, which no other thread may use during the preparation.
    live: this member's current buffers.
    memory: a map from state kind to the dtype and device of the next buffers.
    on_device: state kinds whose current buffers are on accelerators.
    make: returns the module's children for a rank of a layout.
    made: the children made for this member; None until they are made.
    own: returns the user's process groups in the next world, as a map from kind to ranks.
    own_count: the number of times that the script has asked for groups of its own.
    number: the number of the engine in its process.
    nodes: the node of each member, the same on all members.
    has_sequence: see `World`.
    budget_bytes: maximum size of staging buffers.
    way: the setting `dynatrain.transport`.
    check: raises SwitchRefused if this member cannot take part.
    building: returns the context manager for building process groups.
    present: the world in which this member trains.
    stop: called in every wait; raises if the switch will not take place.
    committed: called as soon as the switch is committed.
    is_lean: whether the new buffers are allocated only once the old ones are released.
    connections: the connections to the next world's members, once they are made.
    source_rank: this member's rank in the current world; None if it has none.
    target_rank: this member's rank in the next world; None if it has none.
    ways: the transports between members.
    """

    proposal: Proposal
    board: Control
    control: Control
    vps: VirtualParameterSpace
    live: Buffers
    memory: Mapping[str, Memory]
    make: Callable[[Layout, int], Made | None]
    budget_bytes: int
    way: str
    on_device: frozenset[str]
    is_lean: bool
    check: Callable[[], None]
    present: World | None
    own: Callable[[], Mapping[str, tuple[int, ...]]]
    own_count: int
    number: int
    has_sequence: bool
    nodes: Mapping[int, str]
    building: Callable[[], AbstractContextManager[None]] = nullcontext
    stop: Callable[[], None] = nothing
    committed: Callable[[], None] = nothing
    status: GroupStatus | None = None
    made: Made | None = None
    world: World | None = None
    connections: Connections | None = None
    buffers: Buffers = field(default_factory=dict)
    kept: set[tuple[str, BufferId]] = field(default_factory=set)
    plans: dict[tuple[str, ...], SwitchPlan] = field(default_factory=dict)
    mine: dict[tuple[tuple[str, ...], bool], ReadyPlan] = field(default_factory=dict)
    costs: dict[tuple[str, ...], Cost] = field(default_factory=dict)
    best: dict[tuple[str, ...], Assignment] = field(default_factory=dict)
    """On rank 0: for each tuple of state kinds, the assignment of members to ranks that moves the fewest bytes."""
    sides: dict[tuple[Layout, int], DigestSide] = field(default_factory=dict)
    error: BaseException | None = None
    seconds: float = 0.0
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _has_said: bool = False

    def __post_init__(self) -> None:
        proposal, member = self.proposal, self.control.member
        members, sources = proposal.members, proposal.source_members
        self.target_rank = members.index(member) if member in members else None
        self.source_rank = sources.index(member) if member in sources else None
        what, key = f"preparing the switch to {proposal.layout}", f"prepare/{proposal.generation}"
        stop = self._stop_if_abandoned
        self._session = Session(self.control, key, proposal.union, what, stop=stop, longest=POLL_SECONDS)
        self.ways = Ways(self.way, self.control, proposal, stop)

    @property
    def own_error(self) -> BaseException | None:
        """The error of the preparation if this member itself has caused it, by refusing the switch or by running out of
        memory or files; otherwise None."""
        error = self.error
        if isinstance(error, DynatrainError):  # errors other than refusals may repeat another member's message
            return error if isinstance(error, SwitchRefused) else None
        is_limit = isinstance(error, MemoryError) or any(words in str(error) for words in LIMITS)
        return error if is_limit else None

    def start(self) -> None:
        """Start the preparation in a thread.

        At its end the thread posts that this member is prepared, or the error if there was one.
        """
        if self.proposal.late or self.status is not None:
            self.present = None  # see `_build`
        self._thread = start_thread(self._run, f"dynatrain-prepare-{self.proposal.generation}")

    def join(self) -> None:
        """Wait for the thread, and raise its error if there was one."""
        if self._thread is not None:
            with OWN_WAITS.waiting("preparing a switch"):
                self._thread.join()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Release the process groups and the memory prepared for a switch that will not take place."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.control.timeout_seconds + ABANDON_SECONDS)  # a peer may die during a build
        self.ways.end()
        if self.world is not None:
            self.control.teardowns.add(drop(self.world, is_broken=True))
            self.world = None
        self.buffers, self.mine, self.sides, self.made, self.present = {}, {}, {}, None, None

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            self.check()
            own = self.own()
            if not self.is_lean:
                self._make_target()
                self.ways.announce()
            if wrong := self._say_ready(None):
                raise SwitchFailed(wrong)
            self._build(own)
            if self._stop.is_set() and self.world is not None:
                self.ways.end()
                self.control.teardowns.add(drop(self.world))
                self.world = None
        except Exception as error:
            self.error = error
        self.live = {}
        self.seconds = time.monotonic() - begin
        try:
            said = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
            if not self._has_said:
                self._say_ready(said)
            agreement.say_prepared(self.control, self.proposal, said)
        except (td.DistError, DynatrainError) as error:  # the store is gone; the main thread will notice it too
            self.error = self.error or error

    def _make_target(self) -> None:
        """Allocate the buffers of the next layout, and make the module's children and the tables for computing
        digests."""
        proposal, source, target, kinds = self.proposal, self.source_rank, self.target_rank, self.vps.present_kinds()
        if target is not None:
            self.kept = self.reusable(self.live)
            local = self.vps.local(proposal.layout, target)
            self.buffers = provide(local, self.memory, self.kept, self.live, self._touched)
        for layout in (proposal.source_layout, proposal.layout):
            mesh = self.vps.mesh(layout)
            _ = mesh and mesh.holders
        room = self.budget_bytes // SIDES_SHARE
        if source is not None:
            side = DigestSide(self.vps, proposal.source_layout, source)
            self.sides[proposal.source_layout, source] = side
            side.make_ready(self.live, kinds, self.kept, room)
            room -= side.nbytes
        if target is not None:
            side = self.sides.setdefault((proposal.layout, target), DigestSide(self.vps, proposal.layout, target))
            room += side.nbytes
            kinds = self.vps.present_kinds(proposal.layout, kinds)
            side.make_ready(self.buffers, kinds, self.kept, room, has_share=source is not None)
            self.made = self.make(proposal.layout, target)

    def _touched(self, numel: int, memory: Memory) -> torch.Tensor:
        if memory.place != HERE:
            return zeros(numel, memory)
        tensor = allocate(numel, memory.dtype)
        if tensor.untyped_storage().nbytes() < 1 << 22:
            return tensor.zero_()
        prefault(tensor, stop=self._stop)
        return tensor

    def _say_ready(self, error: str | None) -> str:
        """Report, once, that this member is ready to build process groups, or that it has failed and others need not
        wait for it.

        Returns the reason why no groups will be built, "" if they will; the same on all members. All members wait for
        each other here, because building groups cannot be interrupted, and a thread that is still building when Python
        exits aborts the process. Raises MemberMissing if members are not ready in time, and SwitchFailed if the switch
        is given up during the wait.
        """
        self._has_said = True
        mine = self.control.member
        errors = [] if error is None else [f"member {mine}: {error}"]
        said = {"errors": errors, "own_groups": [[mine, self.own_count]]}
        doing = "building the next world's groups"
        wrong: str = self._session.reduce("building", said, joined_readiness, judged_readiness, doing)
        return wrong

    def _build(self, own: Mapping[str, tuple[int, ...]]) -> None:
        """Build the process groups of the next world, which may reuse groups of the current one, and compute the moves
        between members.

        A late switch (optimizer state moves after training has resumed) reuses no groups: a batch abandoned in the new
        world leaves messages in its groups, and the old world must be able to continue. An elastic job reuses none
        either: messages still in transit in a world that has lost a member must not reach another world.

        own: the user's process groups in the next world.
        """
        board, proposal = self.control, self.proposal
        spec = WorldSpec(
            proposal.generation,
            board.member,
            proposal.members,
            proposal.source_members,
            proposal.layout,
            self.vps.ties(proposal.layout),
            own,
            self.number,
            self.has_sequence,
            moves_apart=proposal.late,
        )
        with self.building():
            self.world = build_world(board.store, spec, board.timeout_seconds, self.status, self.present)
        if self.is_lean:
            return
        self.ways.meet()
        kinds = self.vps.present_kinds()
        if is_accelerated() or self.way == "nccl":
            stay = self._device_kinds & self.on_device
            self.ways.agree_on_batching(self._part(kinds), stay, self.budget_bytes, self._session, self.world)
        self.cost(kinds)
        if self.source_rank == 0:
            # members that were not asked to take a rank can only lower the bound; rank 0's member would keep its rank
            first = proposal.source_members[0]
            candidates = [member for member in proposal.union if member != first or member in proposal.members]
            self.best[kinds] = assign_slots(self.vps, proposal.layout, candidates, kinds=kinds)

    def _stop_if_abandoned(self) -> None:
        if self._stop.is_set():
            raise SwitchFailed("the switch was given up while it was being prepared")
        self.stop()

    # ---- what the switch asks for ------------------------------------------------------------------------------------

    def plan(self, kinds: tuple[str, ...]) -> SwitchPlan:
        """Return the plan of all moves for the given state kinds. (The optimizer has no moments before its first
        step.)"""
        if kinds not in self.plans:
            target = self.proposal.layout, self.proposal.members
            self.plans[kinds] = plan_switch(self.vps, *target, kinds, nodes=self.nodes)
        return self.plans[kinds]

    def _part(self, kinds: tuple[str, ...], is_late: bool = False) -> MemberPlan:
        """Return this member's part of the plan for the pause or, with `is_late`, for the optimizer state that moves
        after it.

        In a late switch, weights are not cast from masters in the pause, because the masters arrive later.
        """
        late = self.late_kinds(kinds) if self.proposal.late else ()
        if late and not is_late:
            kinds = tuple(kind for kind in kinds if kind not in late)
        part = self.plan(kinds).for_member(self.control.member)
        return part.only(late) if is_late else part

    def moves(self, kinds: tuple[str, ...], is_late: bool = False) -> ReadyPlan:
        """Return this member's moves of the given state kinds: those made in the pause or, with `is_late`, those made
        after it.

        Late moves never use the accelerators' communicators: two communicators can block each other if ranks start
        their kernels in different orders.
        """
        if (kinds, is_late) not in self.mine:
            sharing = self.ways.sharing(self.on_device, self._device_kinds) if self.on_device else None
            batching = None if is_late else self.ways.batching
            part = self._part(kinds, is_late)
            self.mine[kinds, is_late] = ReadyPlan.of(part, self.budget_bytes, not is_accelerated(), sharing, batching)
        return self.mine[kinds, is_late]

    @property
    def _device_kinds(self) -> frozenset[str]:
        """State kinds whose buffers will be on an accelerator after the switch."""
        return frozenset(kind for kind, held in self.memory.items() if held.place.device != HOST)

    def late_kinds(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the state kinds that are read or written only by an optimizer step, and that a late switch therefore
        moves after the pause.

        Masters are excluded if they share the weights' memory.
        """
        masters = {MASTER} if is_one_memory(self.memory, self.proposal.layout) else set()
        return tuple(kind for kind in kinds if row_of(kind).needed_for == "step" and kind not in masters)

    def reusable(self, live: Buffers) -> set[tuple[str, BufferId]]:
        """Return the keys of this member's current buffers that the next layout can use in place.

        live: the current buffers.

        A late switch (optimizer state moves after training has resumed) reuses no gradient buffer: backward passes
        write to these buffers before the outcome is decided, and the old world may have to continue with them.
        """
        if self.target_rank is None:
            return set()
        kept = reusable(self.vps, self.source_rank, self.proposal.layout, self.target_rank, live, self.memory)
        return {key for key in kept if not row_of(key[0]).is_gradient} if self.proposal.late else kept

    def target(self, rank: int, live: Buffers, kinds: tuple[str, ...]) -> Buffers:
        """Return the buffers of the next layout. If current buffers can no longer be reused, allocate new ones.

        live: the current buffers.
        kinds: the state kinds that exist now.
        """
        for key in self.kept:
            if key not in live or live[key].data_ptr() != self.buffers[key].data_ptr():
                self.kept = self.reusable(live)
                local = self.vps.local(self.proposal.layout, rank)
                self.buffers = provide(local, self.memory, self.kept, live, zeros)
                break
        absent = {*self.vps.present_kinds(self.proposal.source_layout)} - {*kinds}
        return {key: held for key, held in self.buffers.items() if key[0] not in absent}

    def cost(self, kinds: tuple[str, ...]) -> Cost:
        """Return the bytes and the memory that this member's part of the plan needs for the given state kinds, late
        moves included."""
        if kinds not in self.costs:
            ready = [self.moves(kinds), *([self.moves(kinds, is_late=True)] if self.proposal.late else [])]
            exchanges = [each for part in ready for each in part.plan.exchanges]
            sent = sum(each.sends.nbytes for each in exchanges)
            received = sum(each.receives.nbytes for each in exchanges)
            peak = peak_bytes(self.plan(kinds), self.control.member, min(self.budget_bytes, sent + received))
            self.costs[kinds] = Cost(sent, max(sent, received), peak)
        return self.costs[kinds]

    def lacks(self, old_world: World | None) -> bool:
        """Return whether the next world needs communicators on this member that the old world does not have."""
        return self.world is not None and self.world.lacks(old_world)


def joined_readiness(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the readiness reports of two groups of members.

    The result has the first few errors, and up to two members that asked for different numbers of process groups.
    """
    errors = [*one["errors"], *other["errors"]]
    return {"errors": errors[:MOST_ERRORS], "own_groups": first_and_other(one["own_groups"], other["own_groups"])}


def judged_readiness(found: dict[str, Any]) -> str:
    """Return the reason why no process groups can be built; "" if they can."""
    wrong = "; ".join(found["errors"])
    if not wrong and len(found["own_groups"]) > 1:
        (one, first), (other, second) = found["own_groups"]
        wrong = (
            f"member {one} has called engine.new_group {first} times and member {other} {second} times: call it on "
            "every process, before the first batch"
        )
    return wrong


# ---- what it came to ---------------------------------------------------------------------------------------------

ACKNOWLEDGED = "acknowledged"
"""Name of the step in which members report that they have read the decision to commit a switch."""
NO_MOVES = TransferStats(0, 0, 0, 0, 0.0, 0.0, 0.0)
SUMS = frozenset({"bytes_kept", "bytes_local", "bytes_sent", "bytes_minimum", "late_bytes"})
"""Names of measurements that are summed over all members; of all other measurements the event has the maximum."""

UNKNOWN = -1
"""Sentinel for a measurement that this member has not made."""


@dataclass
class Outcome:
    """Outcome of a switch on this member, and its measurements. Times are in milliseconds, sizes in bytes.

    is_rebuilt: whether the optimizer was detached, even if it was attached again.
    stats: statistics of the moves in the pause.
    late_stats: statistics of the moves after the pause.
    cost: the bytes and the memory that this member's part of the plan needs.
    best: on rank 0, the assignment of members to ranks that moves the fewest bytes, if it was computed.
    layer_bytes: bytes sent to transfer the state that layers keep besides parameters.
    late_ms: duration of the moves after the pause, digests included.
    late_wait_ms: how long the optimizer step had to wait for these moves.
    pause_ms: duration of the pause of a late switch; None for any other switch.
    certificate_ms: time spent on computing digests and checking where elements lie, excluding waits for other members.
    connections: the connections to the next world's members.
    """

    committed: bool = False
    is_rebuilt: bool = False
    is_uncertain: bool = False
    """Whether the outcome could not be read, so that this member rolled back while others may have committed."""
    reason: str = ""
    digest: str = ""
    kinds: tuple[str, ...] = ()
    stats: TransferStats | None = None
    late_stats: TransferStats | None = None
    cost: Cost = field(default_factory=Cost)
    best: Assignment | None = None
    layer_bytes: int = 0
    late_ms: float = 0.0
    late_wait_ms: float = 0.0
    pause_ms: float | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    certificate_ms: float = 0.0
    peak_memory: int = 0
    connections: Connections = field(default_factory=Connections)
    over_all: dict[str, Any] = field(default_factory=dict)
    """Measurements over all members: for bytes kept, copied locally and sent, the sum; for all others, the maximum."""
    warnings: list[str] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        """Return this member's measurements as a record. Its names are those of the fields of `SwitchEvent`."""
        now, late = self.stats or NO_MOVES, self.late_stats or NO_MOVES
        return {
            "bytes_kept": now.bytes_in_place + late.bytes_in_place,
            "bytes_local": now.bytes_local + late.bytes_local,
            "bytes_sent": now.bytes_sent + late.bytes_sent + self.layer_bytes,
            "bytes_minimum": self.cost.bytes_sent + self.layer_bytes,
            "bytes_bound": UNKNOWN if self.best is None else self.best.bytes_bound,
            "rank_zero_bytes": UNKNOWN if self.best is None else self.best.rank_zero_bytes,
            "bytes_busiest": self.cost.bytes_busiest,
            "memory_bound_bytes": self.cost.highest_peak_bytes,
            "move_ms": self.phases_ms.get("move", 0.0) + self.late_ms,
            "late_bytes": late.bytes_sent,
            "late_ms": self.late_ms,
            "certificate_ms": self.certificate_ms,
            "peak_memory_bytes": self.peak_memory,
            "communicators_built": self.connections.built,
            "communicators_kept": self.connections.kept,
            "connect_ms": self.connections.milliseconds,
            "connect_pause_ms": 0.0 if self.connections.is_ahead else self.connections.milliseconds,
        }

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that records the duration of its block as the duration of a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases_ms[name] = 1e3 * (time.perf_counter() - begin)

    def acknowledge(self, session: Session) -> bool:
        """Wait until all members have read the decision to commit, and collect their measurements in `over_all`.

        Returns whether all members have read it. A missing member only causes a warning, because the switch can no
        longer be undone.
        """
        try:
            self.over_all = session.reduce(ACKNOWLEDGED, self.measured(), over_all, doing="acknowledging the commit")
        except (DynatrainError, td.DistError) as missing:
            self.warnings.append(str(missing))
        return bool(self.over_all)


def over_all(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the measurements of two groups of members: sums of some, the maximum of the others."""
    return {name: (mine + other[name]) if name in SUMS else max(mine, other[name]) for name, mine in one.items()}
