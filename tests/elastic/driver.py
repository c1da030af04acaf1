"""A membership with a clock that a test turns, and the members' side of the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ds_dynatrain.elastic.generation import Generation, member_id, node_of
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import Announce, Bye, Probed, Report
from ds_dynatrain.elastic.roster import Effect, Finish, GiveUpMember, ProbeMembers, Publish
from ds_dynatrain.elastic.settings import Settings


@dataclass
class Driver:
    """`foreign` is the newest world that each member was told of; it outlives the coordinator, as members do."""

    settings: Settings
    now: float = 1000.0
    terms: int = 0
    told: dict[str, Generation] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    worlds: list[Generation] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    """Members that have said that they made a step."""
    breaches: dict[str, int] = field(default_factory=dict)
    """Members in whose world a collective has failed, with no generation since that ends it; of which they said so."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Where the members of a node can be connected to; nobody tries where that is not said."""
    blocked: set[tuple[str, str]] = field(default_factory=set)
    """The pairs of nodes of which the first does not reach the second."""

    def __post_init__(self) -> None:
        self.membership = self._new()

    @property
    def world(self) -> Generation:
        """The newest one."""
        return self.worlds[-1]

    def start(self, *nodes: str, size: int = 1, is_ready: bool = True, restarts: int = 0) -> None:
        """Workers of these nodes come, and get ready."""
        for node in nodes:
            for local_rank in range(size):
                member = member_id(node, local_rank)
                self.sizes[member] = size
                self.announce(member, restarts)
                if is_ready:
                    self.say(member, ready=True)

    def announce(self, member: str, restarts: int = 0, nonce: str = "") -> None:
        """A member says who it is and what it knows. nonce: of its process, which may have been here before."""
        node, local_rank = member.rsplit("/", 1)
        said = Announce(
            node=node,
            local_rank=int(local_rank),
            local_size=self.sizes[member],
            pid=7,
            nonce=nonce,
            restarts=restarts,
            world=self.told.get(member),
            reach=self.hosts.get(node, ""),
        )
        assert self.membership.announce(said, self.now) == member
        self.reports.setdefault(member, Report())

    def say(self, member: str, **changes: object) -> None:
        """A member reports."""
        self.reports[member] = self.reports[member].model_copy(update=changes)
        self.trained |= {member} if self.reports[member].step else set()
        self.membership.report(member, self.reports[member], self.now)

    def bye(self, member: str, has_left: bool = True) -> None:
        """A member's script has ended, or it was let go."""
        newest = self.told[member].generation if member in self.told else 0
        self.membership.bye(member, Bye(newest=newest, has_left=has_left), self.now)

    def die(self, member: str) -> None:
        """A member's process is gone."""
        self.membership.lost(member, "the connection ended", self.now)

    def breach(self, member: str, is_late: bool = False) -> None:
        """A collective of a member's world has failed. is_late: its word arrives after the next generation's record."""
        self.breaches[member] = self.told[member].generation
        if not is_late:
            self.say(member, broken=self.breaches[member])

    def _say_again(self, world: Generation, members: Iterable[str]) -> None:
        """Members of whose world a collective has failed are told of a generation."""
        for member in [one for one in members if one in self.breaches]:
            self.say(member, broken=self.breaches[member])
            if world.broken >= self.reports[member].entered:
                del self.breaches[member]
            else:
                self.breaches[member] = world.generation
                self.say(member, broken=world.generation)

    def part(self, one: str, other: str) -> None:
        """Two nodes do not reach each other any more."""
        self.blocked |= {(one, other), (other, one)}

    def enter(self, *members: str) -> None:
        """Members (by default all) enter the newest world that they were told of."""
        for member in members or [one for one in self.world.members if one in self.membership.roster]:
            self.say(member, entered=self.told[member].generation)

    def wait(self, seconds: float = 0.06) -> list[Effect]:
        """Time goes on; all but the silent ones send their heartbeats."""
        end, effects = self.now + seconds, list[Effect]()
        while True:
            self.now = min(end, max(self.now, self.membership.deadline))
            for entry in list(self.membership.roster.values()):
                if entry.member not in self.silent:
                    self.membership.report(entry.member, self.reports[entry.member], self.now)
            effects += self._act(self.membership.advance(self.now))
            if self.now >= end:
                return effects

    def restart(self) -> None:
        """The coordinator dies, and another one is started; nobody has announced itself yet."""
        self.membership = self._new()

    def _new(self) -> MembershipStateMachine:
        self.terms += 1
        return MembershipStateMachine(self.settings, f"{self.terms:x}", self.now)

    def _act(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            match effect:
                case Publish(world, to):
                    self.told.update(dict.fromkeys(to, world))
                    if not self.worlds or world != self.worlds[-1]:
                        self.worlds.append(world)
                    self._say_again(world, [one for one in to if one in self.membership.roster])
                case GiveUpMember(member, _, _):
                    self.fenced.append(member)
                case ProbeMembers(member, peers):
                    nodes = {address: node for node, address in self.hosts.items()}
                    here = node_of(member)
                    cut = tuple(peer for peer in peers if (here, nodes[peer]) in self.blocked)
                    rest = tuple(peer for peer in peers if peer not in cut)
                    self.membership.probed(member, Probed(reached=rest, unreached=cut), self.now)
                case Finish(to):
                    self.finished += to
        return effects


def running(*nodes: str, most: int = 8, least: int = 1, size: int = 1) -> Driver:
    """A job that trains on these nodes."""
    driver = Driver(Settings(least, most))
    driver.start(*nodes, size=size)
    driver.wait(driver.settings.recovery_seconds + 0.1)
    driver.enter()
    driver.wait()
    return driver
