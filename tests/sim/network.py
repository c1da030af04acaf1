"""A virtual network and clock between a coordinator and its members; the coordinator's decisions are the product's.

Messages of one connection arrive in order, each after a latency of its own; those of different connections in any
order. A connection can be cut for a while: what is sent then arrives afterwards, unless it was given up meanwhile.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ds_dynatrain.elastic.generation import Generation, member_id
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import Announce, Bye, Probed, Report
from ds_dynatrain.elastic.roster import Effect, GiveUpMember, ProbeMembers, Publish
from ds_dynatrain.elastic.settings import ORPHAN_SECONDS, Settings
from ds_dynatrain.errors import JobFinished, PeerRefused

LATENCIES = (0.0001, 0.001, 0.001, 0.005, 0.05)
RETRY_SECONDS = 0.2
PROBE_SECONDS = 0.1
"""How long members take to find out whom they reach."""
Action = Callable[[], None]


@dataclass
class Line:
    """A member's connection. term: of the coordinator at its other end, empty while there is none.

    number: of the member's present connection; taken: of the one that the coordinator has for it, 0 if it has none.
    """

    member: str
    restarts: int = 0
    reach: str = ""
    term: str = ""
    number: int = 0
    taken: int = 0
    lost_at: float = 0.0
    cut_until: float = 0.0
    hangs_from: float = 0.0
    hangs_until: float = 0.0
    free_at: float = 0.0
    """When the last message that is under way arrives, in either direction."""
    is_ended: bool = False
    said: deque[tuple[str, int, Callable[[MembershipStateMachine], None]]] = field(default_factory=deque)
    """What is under way to the coordinator, with the term and the number of the connection."""


@dataclass
class Network:
    """As far as a member sees it, the same as `tests.elastic.driver.Driver`.

    on_told: a member has heard of a generation. on_end: its process has to end, and why.
    """

    settings: Settings
    chance: random.Random
    on_told: Callable[[str], None]
    on_end: Callable[[str, str], None]
    now: float = 1000.0
    told: dict[str, Generation] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    worlds: list[Generation] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)
    lines: dict[str, Line] = field(default_factory=dict)
    membership: MembershipStateMachine | None = None
    terms: int = 0
    """Number of coordinators so far."""
    parted: dict[frozenset[str], float] = field(default_factory=dict)
    """Until when two hosts do not reach each other."""
    _paused_until: float = 0.0
    _events: list[tuple[float, int, Action]] = field(default_factory=list)
    _count: int = 0

    # -- time --------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, action: Action) -> None:
        """Let something happen later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run(self, seconds: float) -> None:
        """Let so much time go by."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """One that knows nothing, unless there is one; members come back to it by themselves."""
        if self.membership is not None:
            return
        self.terms += 1
        self.membership = MembershipStateMachine(self.settings, f"{self.terms:x}", self.now)
        self._paused_until = 0.0
        self._keep_time(self.membership)

    def kill_coordinator(self) -> None:
        """All connections to it end."""
        self.membership = None
        for line in self.lines.values():
            self._lose(line)

    def pause_coordinator(self, seconds: float) -> None:
        """It does nothing for a while, and then all that has come meanwhile."""
        self._paused_until = max(self._paused_until, self.now + seconds)

    def _keep_time(self, membership: MembershipStateMachine) -> None:
        if membership is self.membership:
            if self.now >= self._paused_until:
                self._act(membership.advance(self.now))
            wake = max(membership.deadline, self._paused_until)
            self.after(max(0.001, wake - self.now), lambda: self._keep_time(membership))

    def _stir(self) -> None:
        if self.membership is not None:
            membership = self.membership
            self.after(max(0.0, membership.deadline - self.now), lambda: self._advance(membership))

    def _advance(self, membership: MembershipStateMachine) -> None:
        if membership is self.membership and self.now >= max(membership.deadline, self._paused_until):
            self._act(membership.advance(self.now))

    def _act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(world, to):
                    self.worlds.append(world)
                    for member in to:
                        self._down(self.lines[member], world)
                case GiveUpMember(member, _, reason):
                    self.lines[member].taken = 0
                    self._lose(self.lines[member])
                    self.after(self._latency(), partial(self.on_end, member, reason))
                case ProbeMembers(member, peers):
                    line = self.lines[member]
                    self.after(PROBE_SECONDS, partial(self._try, line, line.term, peers))
                case _:
                    pass

    def _try(self, line: Line, term: str, peers: tuple[str, ...]) -> None:
        """A member has tried to connect to others' hosts."""
        reached = tuple(peer for peer in peers if self.reaches(line.reach, peer))
        said = Probed(reached=reached, unreached=tuple(peer for peer in peers if peer not in reached))
        if line.term == term and not line.is_ended:
            self._up(line, lambda to: to.probed(line.member, said, self.now))

    def reaches(self, one: str, other: str) -> bool:
        """Whether two addresses are of hosts that reach each other."""
        return self.parted.get(frozenset((one, other)), 0.0) <= self.now

    # -- connections -------------------------------------------------------------------------------------------------

    def start(self, node: str, restarts: int = 0, reach: str = "") -> None:
        """A worker of a new node tries to reach the coordinator, and is ready as soon as it does.

        reach: where others can connect to it; nobody tries where it is empty.
        """
        member = member_id(node, 0)
        self.reports[member] = Report(ready=True)
        self.lines[member] = Line(member, restarts, reach, lost_at=self.now)
        self._connect(self.lines[member])
        self._beat(self.lines[member])

    def say(self, member: str, **changes: object) -> None:
        """A member reports."""
        self.reports[member] = self.reports[member].model_copy(update=changes)
        self._report(self.lines[member])

    def bye(self, member: str, has_left: bool = True) -> None:
        """A member's script has ended, or it was let go."""
        line, newest = self.lines[member], self.told[member].generation if member in self.told else 0
        said = Bye(newest=newest, has_left=has_left)
        self._up(line, lambda to: to.bye(member, said, self.now))
        line.is_ended = True

    def die(self, member: str) -> None:
        """A member's process is gone."""
        line = self.lines[member]
        self._up(line, lambda to: to.disconnected(member, "its connection ended", self.now))
        line.is_ended = True

    def drop(self, member: str, seconds: float) -> None:
        """The member's connection breaks, and the coordinator's end of it only notices some seconds later."""
        line = self.lines[member]
        if line.term and not line.is_ended:
            number, membership = line.number, self.membership
            self._lose(line)
            self.after(seconds, lambda: self._notice(line, number, membership))

    def _notice(self, line: Line, number: int, membership: MembershipStateMachine | None) -> None:
        """The coordinator's end of a connection ends, unless another one has taken its place."""
        if membership is not None and membership is self.membership and line.taken == number:
            line.taken = 0
            membership.disconnected(line.member, "its connection ended", self.now)
            self._stir()

    def hang(self, member: str, seconds: float) -> None:
        """Its main thread stands still for a while; its heartbeats say so."""
        line = self.lines[member]
        line.hangs_from = line.hangs_from if self.hangs(member) else self.now
        line.hangs_until = max(line.hangs_until, self.now + seconds)

    def hangs(self, member: str) -> bool:
        """Whether its main thread stands still."""
        return self.now < self.lines[member].hangs_until

    def cut(self, member: str, seconds: float) -> None:
        """Nothing gets through for a while."""
        line = self.lines[member]
        line.cut_until = max(line.cut_until, self.now + seconds)

    def _beat(self, line: Line) -> None:
        if not line.is_ended:
            self._report(line)
            self.after(self.settings.beat_seconds, lambda: self._beat(line))

    def _report(self, line: Line) -> None:
        blocked = self.now - line.hangs_from if self.hangs(line.member) else 0.0
        said = self.reports[line.member].model_copy(update={"blocked_seconds": blocked})

        def deliver(to: MembershipStateMachine) -> None:
            self.trained |= {line.member} if said.step else set()
            to.report(line.member, said, self.now)

        self._up(line, deliver)

    def _connect(self, line: Line) -> None:
        """Again and again, until it is let in or has to end."""
        if line.is_ended or line.term:
            return
        if self.membership is None or self.now < max(line.cut_until, self._paused_until):
            if self.now - line.lost_at > ORPHAN_SECONDS and line.member in self.told:
                self.on_end(line.member, "no coordinator")
            else:
                self.after(RETRY_SECONDS + self._latency(), lambda: self._connect(line))
            return
        node, world = line.member.partition("/")[0], self.told.get(line.member)
        said = Announce(
            node=node,
            local_rank=0,
            local_size=1,
            pid=7,
            nonce=line.member,
            restarts=line.restarts,
            world=world,
            reach=line.reach,
        )
        try:
            self.membership.announce(said, self.now)
        except (PeerRefused, JobFinished) as error:
            self.on_end(line.member, str(error))
            return
        line.term, line.number = self.membership.term, line.number + 1
        line.taken = line.number
        self._report(line)
        self._stir()

    def _lose(self, line: Line) -> None:
        if line.term:
            line.term, line.lost_at = "", self.now
            self.after(self._latency(), lambda: self._connect(line))

    def _up(self, line: Line, deliver: Callable[[MembershipStateMachine], None]) -> None:
        if line.term:
            line.said.append((line.term, line.number, deliver))
            self.after(self._arrival(line), lambda: self._take(line))

    def _take(self, line: Line) -> None:
        """The coordinator reads a line's next message, once it can."""
        if self.now < self._paused_until:
            self.after(self._paused_until - self.now, lambda: self._take(line))
            return
        term, number, deliver = line.said.popleft()
        if self.membership is not None and self.membership.term == term and line.taken == number:
            try:
                deliver(self.membership)
            except PeerRefused as error:
                line.taken = 0
                self.membership.lost(line.member, str(error), self.now)
                self.on_end(line.member, str(error))
            self._stir()

    def _down(self, line: Line, world: Generation) -> None:
        term = line.term

        def arrive() -> None:
            known = self.told.get(line.member)
            if line.term == term and not line.is_ended and (known is None or known.generation < world.generation):
                self.told[line.member] = world
                self.on_told(line.member)

        if term:
            self.after(self._arrival(line), arrive)

    def _arrival(self, line: Line) -> float:
        """Seconds until a message that is sent now arrives; not before the one that was sent last."""
        line.free_at = max(line.free_at, max(self.now, line.cut_until) + self._latency())
        return line.free_at - self.now

    def _latency(self) -> float:
        return self.chance.choice(LATENCIES)
