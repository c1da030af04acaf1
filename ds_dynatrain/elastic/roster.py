"""The roster of workers that count as alive, the record of members that return to a new coordinator, and the actions
that the membership decides on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import get_args

from ds_dynatrain.elastic.generation import MOST_MEMBERS, Generation, member_id, node_of
from ds_dynatrain.elastic.messages import Announce, Engines, Report
from ds_dynatrain.errors import PeerRefused


@dataclass(frozen=True)
class Publish:
    """Action: send a generation to members."""

    world: Generation
    to: tuple[str, ...]


@dataclass(frozen=True)
class GiveUpMember:
    """Action: end a member's connection, and also its process if the member's agent can do so.

    pid: the process's id; None if the member never reported it.
    """

    member: str
    pid: int | None
    reason: str


@dataclass(frozen=True)
class ProbeMembers:
    """Action: ask a member to which addresses of other members it can connect."""

    member: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Finish:
    """Action: inform members that the job has finished."""

    to: tuple[str, ...]


Effect = Publish | GiveUpMember | ProbeMembers | Finish
"""Any action that the membership decides on. The coordinator carries actions out, because it holds the connections."""


@dataclass
class RosterEntry:
    """One worker that counts as alive. Times are in seconds by the caller's clock."""

    member: str
    local_rank: int
    local_size: int
    pid: int
    nonce: str
    heard: float
    report: Report = field(default_factory=Report)
    arrival: int = 0
    """Position in the order in which workers became ready, counted from 1; 0 if the worker is not ready yet."""
    reach: str = ""
    """Address at which others can try to connect to the worker; "" if unknown."""

    @property
    def host(self) -> str:
        """Host part of the address `reach`. All workers of one machine have the same host."""
        return self.reach.rpartition(":")[0]

    @property
    def is_waiting(self) -> bool:
        """Whether the worker is ready to join now.

        False while the worker is building its engines for a generation that the others have entered without it.
        """
        return self.report.ready and not self.report.leaving and self.report.engines != "building"


class Roster(dict[str, RosterEntry]):
    """The workers that count as alive, keyed by id in the order in which they were added. The roster also groups them
    by node."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: defaultdict[str, dict[str, RosterEntry]] = defaultdict(dict)
        self._arrivals = 0

    def add(self, said: Announce, now: float) -> RosterEntry:
        """Add a worker. Raises PeerRefused if the worker's announcement is invalid or contradicts that of another
        worker."""
        member = member_id(said.node, said.local_rank)
        if said.local_rank >= said.local_size:
            raise PeerRefused(
                f"{member}: local rank {said.local_rank} of {said.local_size} workers; set LOCAL_RANK below "
                "LOCAL_WORLD_SIZE"
            )
        if member in self:
            raise PeerRefused(f"{member} is here already, with process {self[member].pid}; end that process first")
        if len(self) >= MOST_MEMBERS:
            raise PeerRefused(
                f"{member}: there are {MOST_MEMBERS} members, and no room for more; end some, or start another job"
            )
        for other in self._nodes.get(said.node, {}).values():
            if other.local_size != said.local_size:
                raise PeerRefused(
                    f"{member} says that its node has {said.local_size} workers, {other.member} says "
                    f"{other.local_size}; start both with one LOCAL_WORLD_SIZE, or give the nodes different names"
                )
        entry = RosterEntry(member, said.local_rank, said.local_size, said.pid, said.nonce, heard=now, reach=said.reach)
        self._put(entry)
        return entry

    def _put(self, entry: RosterEntry) -> None:
        self[entry.member] = self._nodes[node_of(entry.member)][entry.member] = entry

    def restore(self, entry: RosterEntry, now: float) -> None:
        """Add a worker again that was removed and has sent a message since."""
        entry.heard = now
        self._put(entry)

    def remove(self, member: str) -> RosterEntry | None:
        """Remove a worker and return its entry; None if it is not in the roster."""
        entry, here = self.pop(member, None), self._nodes[node_of(member)]
        here.pop(member, None)
        if not here:
            del self._nodes[node_of(member)]
        return entry

    def report(self, member: str, report: Report, now: float) -> bool:
        """Store a worker's report, and return whether a value that matters for membership has changed.

        Raises PeerRefused if such a value has decreased, which means that the report contradicts an earlier one.
        """
        entry = self[member]
        old = entry.report
        before, after = _lasting_values(old), _lasting_values(report)
        if any(one > other for one, other in zip(before, after, strict=True)):
            raise PeerRefused(
                f"{member} takes back what it said: {old!r}, then {report!r}; start it again to join as a new process"
            )
        entry.report, entry.heard = report, now
        if report.ready and not old.ready:
            self._arrivals += 1
            entry.arrival = self._arrivals
        return before != after

    def complete_nodes(self, apart: Container[str]) -> list[tuple[str, ...]]:
        """Return the members, by local rank, of every node whose workers are all ready to join.

        Nodes are in the order in which they became ready.

        apart: members that are left out because they already work.
        """
        waiting = (
            [entry for entry in node.values() if entry.is_waiting and entry.member not in apart]
            for node in self._nodes.values()
        )
        complete = [node for node in waiting if node and len(node) == node[0].local_size]
        complete.sort(key=lambda node: max(entry.arrival for entry in node))
        return [tuple(entry.member for entry in sorted(node, key=lambda one: one.local_rank)) for node in complete]

    def forgive(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence of any worker. Called when the coordinator itself was not running
        during that time."""
        for entry in self.values():
            entry.heard += seconds


def _lasting_values(report: Report) -> tuple[int, ...]:
    """Return the values of a report that matter for membership. None of them may decrease from one report to the
    next."""
    engines = get_args(Engines).index(report.engines)
    return report.ready, report.leaving, report.entered, report.broken, report.lacking, engines


class Recovery:
    """Period after a restart of the coordinator in which members return and say which world they know. When the
    recovery ends, one of these worlds is chosen.

    The recovery ends when all members of the newest world have returned, or `seconds` after the last return. If no
    member has returned but some still may, the recovery lasts until the time given to `expect`.
    """

    def __init__(self, until: float, seconds: float) -> None:
        self._until = self._patience = until
        self._seconds = seconds
        self.told: dict[str, Generation] = {}
        """The newest world that each returning member knew when it returned."""
        self.reported = set[str]()
        """Returning members that have reported their state."""
        self._worlds: dict[tuple[int, bool, str], Generation] = {}
        self._votes: Counter[tuple[int, bool, str]] = Counter()

    @property
    def until(self) -> float:
        """The latest time at which the recovery ends, by the caller's clock."""
        return self._until if self.told else max(self._until, self._patience)

    @property
    def is_complete(self) -> bool:
        """Whether all members of the newest world have returned and reported."""
        world = self.choose()
        return world is not None and self.reported.issuperset(world.everyone)

    def expect(self, patience: float) -> None:
        """Record that there was an earlier job whose members may still return.

        patience: the time until which to wait for the first of these members.
        """
        self._patience = max(self._patience, patience)

    def forgive(self, seconds: float) -> None:
        """Extend the recovery by `seconds`. Called when the coordinator itself was not running during that time."""
        self._until += seconds

    def hear(self, member: str, world: Generation, now: float) -> None:
        """Record the newest world that a returning member knows.

        now: the time by the caller's clock.
        """
        self._until = max(self._until, now + self._seconds)
        self.told[member] = world
        name = world.generation, world.begun, world.term
        self._worlds.setdefault(name, world)
        self._votes[name] += 1

    def choose(self) -> Generation | None:
        """Return the newest world that any returning member knows; None if no member has returned.

        If several worlds have the same number, worlds of a job in which a step was taken come first, and among these
        the world that most members know.
        """
        if not self._worlds:
            return None
        return self._worlds[max(self._worlds, key=lambda name: (name[0], name[1], self._votes[name], name[2]))]
