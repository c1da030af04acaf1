"""Hosts of a job that cannot reach each other, and the largest set of nodes that can reach each other.

This is the coordinator's side, without sockets and without a clock. When no member has taken a step for a while,
members try to connect to each other (`reach`), and their results are collected here. A host is identified by the
address that its process groups use, so the results about a host remain valid after its processes have ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from ds_dynatrain.elastic.generation import node_of
from ds_dynatrain.elastic.messages import MOST_PROBED, Probed
from ds_dynatrain.elastic.roster import ProbeMembers, Roster

Node = TypeVar("Node", bound=Hashable)
STANDSTILL = 2
"""The world is at a standstill once no member has taken a step or entered a generation for this multiple of
`silent_seconds`."""
RAREST = 12
"""The longest interval between connection tests, as a multiple of `silent_seconds`. It applies if all hosts reach each
other and the standstill has another reason, such as an evaluation."""
FAILURES = 2
"""Number of consecutive failures in each direction after which two hosts count as disconnected; fewer failures may be
packet loss."""
MOST_LINKS = 1 << 16
"""The maximum number of pairs of hosts whose failures are remembered; the oldest are forgotten."""
MOST_BRANCHES = 10_000
"""The maximum number of branches in the search for the largest set. Beyond this limit the result is large, but may not
be the largest."""


class HostLinks:
    """Record of which hosts of a job can connect to each other, from members' attempts.

    seconds: `silent_seconds` of the job's settings.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = self._pause = seconds
        self._failures = Counter[tuple[str, str]]()
        self._moved_at = self._probe_at = now

    def move(self, now: float) -> None:
        """Record that a member of the world has taken a step or entered a generation."""
        self._moved_at = now
        self.look(now)

    def look(self, now: float) -> None:
        """Schedule the next connection tests for `silent_seconds` from now, or keep them if they are due earlier."""
        self._pause = self._seconds
        self._probe_at = min(self._probe_at, now + self._seconds)

    def still_for(self, now: float) -> float:
        """Return the number of seconds since a member of the world last took a step or entered a generation."""
        return now - self._moved_at

    def stands_still(self, now: float) -> bool:
        """Return whether training has been at a standstill for so long that a network failure may be the cause."""
        return self.still_for(now) > STANDSTILL * self._seconds

    def probes(self, roster: Roster, there: Iterable[str], now: float) -> list[ProbeMembers]:
        """Return the connection tests that are due.

        In a standstill one member of each host tries all other hosts. Otherwise only pairs of hosts with recorded
        failures are tried.

        there: members of the world that are connected to the coordinator.
        """
        if now < self._probe_at:
            return []
        speakers = {entry.host: entry for entry in reversed(roster.values()) if entry.host}
        standing = {roster[one].host for one in there} if self.stands_still(now) else set[str]()
        doubted = self._failed_links()
        slower = min(2 * self._pause, RAREST * self._seconds)
        self._pause = slower if standing and doubted.keys().isdisjoint(speakers) else self._seconds
        self._probe_at = now + self._pause
        probes = list[ProbeMembers]()
        for host in speakers:
            others = doubted.get(host, set())
            asked = (others | standing if host in standing else others).intersection(speakers) - {host}
            peers = tuple(speakers[other].reach for other in sorted(asked))
            parts = (peers[start : start + MOST_PROBED] for start in range(0, len(peers), MOST_PROBED))
            probes += [ProbeMembers(speakers[host].member, part) for part in parts]
        return probes

    def hear(self, host: str, said: Probed, now: float) -> bool:
        """Record the connection test results of a member of `host`; return whether they change which pairs of hosts
        count as disconnected.

        A connection needs packets in both directions, so a success clears the failures of both directions.
        """
        before = self.parted
        for other in map(_host, said.reached):
            self._failures.pop((host, other), None)
            self._failures.pop((other, host), None)
        for other in map(_host, said.unreached):
            self._failures[host, other] += 1
            if len(self._failures) > MOST_LINKS:
                del self._failures[next(iter(self._failures))]
        if said.unreached:
            self.look(now)
        return self.parted != before

    @property
    def parted(self) -> set[tuple[str, str]]:
        """Pairs of hosts that cannot reach each other, each in alphabetical order."""
        return {pair for pair in self._failures if pair[0] < pair[1] and self._are_parted(*pair)}

    def outside(self, roster: Roster, there: Sequence[str]) -> dict[str, str]:
        """Return the members whose nodes are not in the largest set of nodes that can all reach each other, as a map
        from member to the reason.

        there: the members to consider.
        """
        hosts = {node_of(one): roster[one].host for one in there}
        kept = largest_reaching(tuple(hosts), lambda one, other: self._are_parted(hosts[one], hosts[other]))
        found = dict[str, str]()
        for one in there:
            here = roster[one].host
            unreached = sorted({hosts[node] for node in kept if self._are_parted(here, hosts[node])})
            if node_of(one) not in kept:
                found[one] = f"{here} and {', '.join(unreached)} do not reach each other"
        return found

    def reaching(self, roster: Roster, nodes: Sequence[tuple[str, ...]], stay: Iterable[str]) -> list[tuple[str, ...]]:
        """Return the nodes that can reach each other and all members that stay.

        nodes: the members of each node.
        stay: the members that stay.
        """
        if not self._failures:
            return list(nodes)
        there = {roster[one].host for one in stay if one in roster}
        hosts = {node: roster[node[0]].host for node in nodes}
        welcome = [node for node in nodes if not any(self._are_parted(hosts[node], other) for other in there)]
        return list(largest_reaching(welcome, lambda one, other: self._are_parted(hosts[one], hosts[other])))

    def _are_parted(self, one: str, other: str) -> bool:
        return min(self._failures[one, other], self._failures[other, one]) >= FAILURES

    def _failed_links(self) -> dict[str, set[str]]:
        """Return, for each host with a recorded connection failure, the other hosts of its failed connections."""
        found = defaultdict[str, set[str]](set)
        for one, other in self._failures:
            found[one].add(other)
            found[other].add(one)
        return found


def largest_reaching(nodes: Sequence[Node], are_parted: Callable[[Node, Node], bool]) -> tuple[Node, ...]:
    """Return the largest set of nodes in which every node can reach every other node. The nodes keep their order.

    If several sets are largest, the one with the first nodes is returned. At least one node of each disconnected pair
    must be removed, so the search removes either one node or all nodes that are disconnected from it. If there are too
    many combinations, the result is the largest set found so far.
    """
    apart = {node: {other for other in nodes if other != node and are_parted(node, other)} for node in nodes}
    branches, best = 0, tuple[int, ...]()

    def search(gone: frozenset[Node]) -> None:
        nonlocal best, branches
        branches += 1
        left = {node: len(apart[node] - gone) for node in nodes if node not in gone}
        if len(left) < len(best) or (best and branches > MOST_BRANCHES):
            return
        most = max(left.values(), default=0)
        if most:
            chosen = [node for node, count in left.items() if count == most][-1]
            search(gone | {chosen})
            search(gone | apart[chosen])
            return
        kept = tuple(place for place, node in enumerate(nodes) if node in left)
        if (-len(kept), kept) < (-len(best), best):
            best = kept

    search(frozenset())
    return tuple(nodes[place] for place in best)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
