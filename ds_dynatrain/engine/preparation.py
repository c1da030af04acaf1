"""What is made ready while training still runs: groups of the next world, the plan, modules, and touched memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.children import Made
from ds_dynatrain.adapters.memory import provide, reusable
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.watched import Fate
from ds_dynatrain.adapters.worlds import World, build_world, drop
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.errors import SwitchFailed
from ds_dynatrain.plan import SwitchPlan, plan_switch
from ds_dynatrain.space import BufferId, Layout, VirtualParameterSpace
from ds_dynatrain.transfer import (
    GroupTransport,
    Neighbors,
    ReadyPlan,
    RoutedTransport,
    Transport,
    allocate,
    prefault,
)

ABANDON_SECONDS = 5.0


def _nothing() -> None:
    """For a job of fixed size."""


@dataclass
class Preparation:
    """One member's side of a switch to come. `start` runs it in a thread, and `join` waits for that.

    board: where the switch is negotiated; control: the same over the connection for work in the background, which
    nobody else may use meanwhile. make: the module's next children for a rank of a layout. made: these, for this
    member. number: of the engine in its process. has_sequence: as `World`. budget_bytes: of staging. way: as
    `dynatrain.transport`. check: raises SwitchRefused if this member cannot take part. building: around the building of
    groups; stop: called in every wait, raises if the switch will not come about; committed: called as soon as it has.
    is_lean: nothing of the target is made, for it has to wait until the source is gone.
    """

    proposal: Proposal
    board: Control
    control: Control
    vps: VirtualParameterSpace
    live: Buffers
    types: Mapping[str, torch.dtype]
    make: Callable[[Layout, int], Made | None]
    budget_bytes: int
    way: str = "auto"
    is_lean: bool = False
    check: Callable[[], None] = _nothing
    building: Callable[[], AbstractContextManager[None]] = nullcontext
    stop: Callable[[], None] = _nothing
    committed: Callable[[], None] = _nothing
    fate: Fate | None = None
    own: Callable[[], Mapping[str, tuple[int, ...]]] = dict
    own_count: int = 0
    made: Made | None = None
    world: World | None = None
    number: int = 1
    has_sequence: bool = False
    neighbors: Neighbors | None = None
    buffers: Buffers = field(default_factory=dict)
    kept: set[tuple[str, BufferId]] = field(default_factory=set)
    plans: dict[tuple[str, ...], SwitchPlan] = field(default_factory=dict)
    mine: dict[tuple[str, ...], ReadyPlan] = field(default_factory=dict)
    error: BaseException | None = None
    seconds: float = 0.0
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _has_said: bool = False

    @property
    def target_rank(self) -> int | None:
        """This member's rank in the world to be."""
        member = self.control.member
        return self.proposal.members.index(member) if member in self.proposal.members else None

    def start(self) -> None:
        """Begin in the background, and post `prepared` when done, with the error if there was one."""
        self._thread = threading.Thread(
            target=self._run, name=f"dynatrain-prepare-{self.proposal.generation}", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread; its error, if any, is raised here."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error

    def plan(self, kinds: tuple[str, ...]) -> tuple[SwitchPlan, ReadyPlan]:
        """The plan for the state kinds that are there now (no moments before the first step),
        and this member's part.
        """
        if kinds not in self.plans:
            self.plans[kinds] = plan_switch(self.vps, self.proposal.layout, self.proposal.members, kinds)
            mine = self.plans[kinds].for_member(self.control.member)
            on_host = all(held.device.type == "cpu" for held in (*self.live.values(), *self.buffers.values()))
            self.mine[kinds] = ReadyPlan.of(mine, self.budget_bytes, on_host)
        return self.plans[kinds], self.mine[kinds]

    def transport(self) -> Transport:
        """Between all members of both worlds; after `join`. SwitchFailed if there is none."""
        if self.world is None or self.world.transfer is None:
            raise SwitchFailed("the groups of the next world are not there")
        group = GroupTransport(self.world.transfer, self.world.transfer_members)
        if self.neighbors is None:
            return group
        self.neighbors.permit()
        return RoutedTransport(self.neighbors, group)

    def end_neighbors(self) -> None:
        """Let no neighbor read this member any more."""
        if self.neighbors is not None:
            self.neighbors.close()
            self.neighbors = None

    def abandon(self) -> None:
        """Let go of groups and memory of a switch that does not come about."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.control.timeout_seconds + ABANDON_SECONDS)  # a peer may die while groups are built
        self.end_neighbors()
        if self.world is not None:
            self.control.bury(drop(self.world))
            self.world = None
        self.buffers, self.mine, self.made = {}, {}, None

    def _run(self) -> None:
        begin = time.monotonic()
        record: dict[str, Any] = {"error": None}
        try:
            self.check()
            own = self.own()
            if not self.is_lean:
                self._make_target()
            self._wait_for_all()
            with self.building():
                self.world = self._build(own)
            if self.way != "gloo" and not self.is_lean:
                self.neighbors = self._meet_neighbors()
            if self._stop.is_set():
                self.end_neighbors()
                self.control.bury(drop(self.world))
                self.world = None
        except Exception as error:
            self.error = error
            record["error"] = f"{type(error).__name__}: {error}"
        self.live = {}
        self.seconds = time.monotonic() - begin
        try:
            self._say_ready(record["error"])
            self.control.post(f"prepared/{self.proposal.generation}/{self.control.member}", record)
        except td.DistError as error:  # the store is gone, as the main thread will see, too
            self.error = self.error or error

    def _make_target(self) -> None:
        self._reserve()
        self.plan(self.vps.present_kinds())
        self._look_ahead()
        if self.target_rank is not None:
            self.made = self.make(self.proposal.layout, self.target_rank)

    def _build(self, own: Mapping[str, tuple[int, ...]]) -> World:
        board, proposal = self.control, self.proposal
        return build_world(
            board.store,
            proposal.generation,
            board.member,
            proposal.members,
            proposal.source_members,
            board.timeout_seconds,
            proposal.layout,
            self.vps.ties(proposal.layout),
            self.fate,
            own,
            self.number,
            self.has_sequence,
        )

    def _wait_for_all(self) -> None:
        """Building groups cannot be broken off, and a thread that is inside of it when Python ends aborts the process.

        So begin when all are here. MemberMissing names who is not, SwitchFailed if the switch is given up meanwhile, or
        somebody cannot come, or knows of other groups of the user's.
        """
        key = f"building/{self.proposal.generation}"
        self._say_ready(None)
        said = self.control.gather(
            key, self.proposal.union, "building the next world's groups", stop=self._stop_if_abandoned
        )
        failed = [f"member {member}: {record['error']}" for member, record in said.items() if record["error"]]
        if failed:
            raise SwitchFailed("; ".join(failed))
        differs = [member for member, record in said.items() if record["own_groups"] != self.own_count]
        if differs:
            raise SwitchFailed(
                f"member {self.control.member} has called engine.new_group {self.own_count} times and member "
                f"{differs[0]} {said[differs[0]]['own_groups']} times: call it on every process, before the first batch"
            )

    def _say_ready(self, error: str | None) -> None:
        """That the others need not wait for this member any longer, or that they will wait in vain; once."""
        if not self._has_said:
            self._has_said = True
            said = {"error": error, "own_groups": self.own_count}
            self.control.post(f"building/{self.proposal.generation}/{self.control.member}", said)

    def _meet_neighbors(self) -> Neighbors:
        """Those on this machine whose memory may be read."""
        board = self.control
        return Neighbors.meet(board.member, self._share, board.timeout_seconds, self._stop_if_abandoned)

    def _share(self, what: str, record: Any) -> dict[int, Any]:
        """Tell all members of both worlds a record, and read theirs."""
        board, key = self.control, f"{what}/{self.proposal.generation}"
        board.post(f"{key}/{board.member}", record)
        return board.gather(key, self.proposal.union, "finding neighbors", stop=self._stop_if_abandoned)

    def _stop_if_abandoned(self) -> None:
        if self._stop.is_set():
            raise SwitchFailed("the switch was given up while it was being prepared")
        self.stop()

    def _look_ahead(self) -> None:
        """What would be computed once, and in the pause: what the certificate and the event are to ask."""
        for plan in self.plans.values():
            _ = plan.bytes_sent
        for layout in (self.proposal.source_layout, self.proposal.layout):
            mesh = self.vps.mesh(layout)
            _ = mesh and mesh.holders

    def _reserve(self) -> None:
        if self.target_rank is None:
            return
        member, vps = self.control.member, self.vps
        rank = vps.members.index(member) if member in vps.members else None
        self.kept = reusable(vps, rank, self.proposal.layout, self.target_rank, self.live)
        self.buffers = provide(
            vps.local(self.proposal.layout, self.target_rank), self.types, self.kept, self.live, self._touched
        )

    def _touched(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = allocate(numel, dtype)
        if tensor.untyped_storage().nbytes() < 1 << 22:
            return tensor.zero_()
        prefault(tensor, stop=self._stop)
        return tensor
