"""Preparation of a switch while training continues: the next world's groups, the plan, modules, and touched memory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups.communicators import Connections
from ds_dynatrain.adapters.groups.device import HOST, is_accelerated, start_thread
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
from ds_dynatrain.plan import Assignment, Cost, MemberPlan, SwitchPlan, assign_slots, peak_bytes, plan_switch
from ds_dynatrain.reshard.digest_sides import DigestSide
from ds_dynatrain.reshard.ways import POLL_SECONDS, Ways
from ds_dynatrain.space import MASTER, BufferId, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.transfer import ReadyPlan, allocate, prefault

LIMITS = (*map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)), "can't allocate memory")
"""Fragments of error messages (also of torch and gloo) about a lack of open files or memory."""
ABANDON_SECONDS = 5.0
MOST_ERRORS = 4
"""Maximum number of members whose errors are reported to all."""
SIDES_SHARE = 2
"""Divisor of the staging budget: digest tables that are made before the pause take at most budget / SIDES_SHARE."""


def nothing() -> None:
    """Do nothing; the default of a preparation's hooks."""


@dataclass
class Preparation:
    """Preparation of a switch on one member. `start` runs it in a thread, and `join` waits for the thread.

    board: the board on which the switch is negotiated.
    control: the same board over the background connection, which no other thread may use during the preparation.
    live: this member's current buffers.
    memory: a map from state kind to the element type and memory of the next buffers.
    on_device: state kinds whose current buffers are on accelerators.
    make: returns the module's children for a rank of a layout.
    made: the children made for this member.
    number: the number of the engine in its process.
    nodes: the node of each member, the same on all members.
    has_sequence: see `World`.
    budget_bytes: maximum size of staging buffers.
    way: the setting `dynatrain.transport`.
    check: raises SwitchRefused if this member cannot take part.
    building: returns the context manager for building groups.
    present: the world in which this member trains.
    stop: called in every wait; raises if the switch will not happen.
    committed: called as soon as the switch is committed.
    is_lean: whether the target's buffers are made only once the source is released.
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
    way: str = "auto"
    on_device: frozenset[str] = frozenset()
    is_lean: bool = False
    check: Callable[[], None] = nothing
    building: Callable[[], AbstractContextManager[None]] = nullcontext
    stop: Callable[[], None] = nothing
    committed: Callable[[], None] = nothing
    status: GroupStatus | None = None
    present: World | None = None
    own: Callable[[], Mapping[str, tuple[int, ...]]] = dict
    own_count: int = 0
    made: Made | None = None
    world: World | None = None
    connections: Connections | None = None
    number: int = 1
    has_sequence: bool = False
    nodes: Mapping[int, str] = field(default_factory=dict)
    buffers: Buffers = field(default_factory=dict)
    kept: set[tuple[str, BufferId]] = field(default_factory=set)
    plans: dict[tuple[str, ...], SwitchPlan] = field(default_factory=dict)
    mine: dict[tuple[tuple[str, ...], bool], ReadyPlan] = field(default_factory=dict)
    costs: dict[tuple[str, ...], Cost] = field(default_factory=dict)
    best: dict[tuple[str, ...], Assignment] = field(default_factory=dict)
    """On rank 0, the assignment of members to ranks that moves the fewest bytes, by state kinds."""
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
        """The error if it is a SwitchRefused or caused by this member's own limit (memory, files); otherwise None."""
        error = self.error
        if isinstance(error, DynatrainError):  # errors other than refusals may repeat another member's message
            return error if isinstance(error, SwitchRefused) else None
        is_limit = isinstance(error, MemoryError) or any(words in str(error) for words in LIMITS)
        return error if is_limit else None

    def start(self) -> None:
        """Start the preparation in a thread.

        At its end the thread posts `prepared`, with the error if there was one.
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
        """Release the groups and the memory of a switch that will not happen."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.control.timeout_seconds + ABANDON_SECONDS)  # a peer may die during a build
        self.ways.end()
        if self.world is not None:
            self.control.track_teardown(drop(self.world, is_broken=True))
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
                self.control.track_teardown(drop(self.world))
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
        """Make the target's buffers, the module's children, and the tables for the certificate and the digests."""
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
        """Report, once, that this member is ready to build groups, or that it failed and others need not wait for it.

        Return why no groups are to be built, or "". The result is the same on all members. They wait for each other
        here because building groups cannot be interrupted, and a thread that is still building when Python exits aborts
        the process. Raises MemberMissing if members are not ready in time, and SwitchFailed if the switch is given up
        during the wait.
        """
        self._has_said = True
        mine = self.control.member
        errors = [] if error is None else [f"member {mine}: {error}"]
        said = {"errors": errors, "own_groups": [[mine, self.own_count]]}
        doing = "building the next world's groups"
        wrong: str = self._session.reduce("building", said, joined_readiness, judged_readiness, doing)
        return wrong

    def _build(self, own: Mapping[str, tuple[int, ...]]) -> None:
        """Build the next world, which may inherit groups of the current one, and compute the moves between members.

        A late switch inherits no groups: a batch abandoned in the new world leaves messages in its groups, and the old
        world must be able to continue. An elastic job inherits none either: nothing that was under way in a world that
        has lost a member can reach another one.
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
            self.best[kinds] = self._best(kinds)

    def _stop_if_abandoned(self) -> None:
        if self._stop.is_set():
            raise SwitchFailed("the switch was given up while it was being prepared")
        self.stop()

    # ---- what the switch asks for ------------------------------------------------------------------------------------

    def plan(self, kinds: tuple[str, ...]) -> SwitchPlan:
        """Return the plan for the given state kinds (the optimizer has no moments before its first step)."""
        if kinds not in self.plans:
            target = self.proposal.layout, self.proposal.members
            self.plans[kinds] = plan_switch(self.vps, *target, kinds, nodes=self.nodes)
        return self.plans[kinds]

    def _part(self, kinds: tuple[str, ...], is_late: bool = False) -> MemberPlan:
        """Return this member's part of the plan for the pause or, with `is_late`, for the late kinds, which move later.

        The pause does not read late kinds, so it casts no weight from a master that arrives later.
        """
        late = self.late_kinds(kinds) if self.proposal.late else ()
        if late and not is_late:
            kinds = tuple(kind for kind in kinds if kind not in late)
        part = self.plan(kinds).for_member(self.control.member)
        return part.only(late) if is_late else part

    def moves(self, kinds: tuple[str, ...], is_late: bool = False) -> ReadyPlan:
        """Return this member's moves of the given state kinds: those in the pause or, with `is_late`, those after it.

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
        """Return the state kinds whose buffers will lie on an accelerator after the switch."""
        return frozenset(kind for kind, held in self.memory.items() if held.place.device != HOST)

    def late_kinds(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kinds that nothing reads or writes before an optimizer step, for a late switch.

        Masters are excluded if they share the weights' memory.
        """
        masters = {MASTER} if is_one_memory(self.memory, self.proposal.layout) else set()
        return tuple(kind for kind in kinds if row_of(kind).needed_for == "step" and kind not in masters)

    def reusable(self, live: Buffers) -> set[tuple[str, BufferId]]:
        """Return the keys of this member's current buffers that the next layout can use in place.

        A late switch reuses no gradient buffer: backward passes write to these buffers before the outcome is decided,
        and the old world may have to continue with them.
        """
        if self.target_rank is None:
            return set()
        kept = reusable(self.vps, self.source_rank, self.proposal.layout, self.target_rank, live, self.memory)
        return {key for key in kept if not row_of(key[0]).is_gradient} if self.proposal.late else kept

    def target(self, rank: int, live: Buffers, kinds: tuple[str, ...]) -> Buffers:
        """Return the target buffers of these kinds. Make new ones if the live buffers can no longer be reused."""
        for key in self.kept:
            if key not in live or live[key].data_ptr() != self.buffers[key].data_ptr():
                self.kept = self.reusable(live)
                local = self.vps.local(self.proposal.layout, rank)
                self.buffers = provide(local, self.memory, self.kept, live, zeros)
                break
        absent = {*self.vps.present_kinds(self.proposal.source_layout)} - {*kinds}
        return {key: held for key, held in self.buffers.items() if key[0] not in absent}

    def cost(self, kinds: tuple[str, ...]) -> Cost:
        """Return what this member's part of the plan costs for the given state kinds, late ones included."""
        if kinds not in self.costs:
            ready = [self.moves(kinds), *([self.moves(kinds, is_late=True)] if self.proposal.late else [])]
            exchanges = [each for part in ready for each in part.plan.exchanges]
            sent = sum(each.sends.nbytes for each in exchanges)
            received = sum(each.receives.nbytes for each in exchanges)
            peak = peak_bytes(self.plan(kinds), self.control.member, min(self.budget_bytes, sent + received))
            self.costs[kinds] = Cost(sent, max(sent, received), peak)
        return self.costs[kinds]

    def _best(self, kinds: tuple[str, ...]) -> Assignment:
        """Return the assignment of members to ranks that moves the fewest bytes.

        Members that were not asked to take a rank count as candidates, which can only lower the bound. Rank 0's member
        would keep its rank, so it counts only if it does.
        """
        proposal, first = self.proposal, self.proposal.source_members[0]
        candidates = [member for member in proposal.union if member != first or member in proposal.members]
        return assign_slots(self.vps, proposal.layout, candidates, kinds=kinds)

    def lacks(self, old_world: World | None) -> bool:
        """Return whether the next world needs communicators on this member that the old world does not have."""
        return self.world is not None and self.world.lacks(old_world)


def joined_readiness(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the reports of two groups of members that are ready.

    The result has the first few errors, and up to two members that asked for different numbers of groups.
    """
    errors = [*one["errors"], *other["errors"]]
    return {"errors": errors[:MOST_ERRORS], "own_groups": first_and_other(one["own_groups"], other["own_groups"])}


def judged_readiness(found: dict[str, Any]) -> str:
    """Return why no groups are to be built, or ""."""
    wrong = "; ".join(found["errors"])
    if not wrong and len(found["own_groups"]) > 1:
        (one, first), (other, second) = found["own_groups"]
        wrong = (
            f"member {one} has called engine.new_group {first} times and member {other} {second} times: call it on "
            "every process, before the first batch"
        )
    return wrong
