"""The plan of a switch: all moves from one layout and set of members to another, per member."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.moves import Moves, for_all, moves, runs
from ds_dynatrain.plan.sides import ANYWHERE, AS_LAID_OUT, Sides
from ds_dynatrain.space import ABSENT, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.space.interval import Ints


def rounds(peers: Iterable[int], me: int, nodes: Mapping[int, str] = ANYWHERE) -> list[int]:
    """Return the peers of `me`, each once, in the order in which `me` exchanges with them.

    nodes: the node of each member; members that are not in it count as being on one node.

    A pair (a, b) has the key (whether both are on one node, a XOR b, smaller of a and b). Both ends know the key
    without communication, and keys order all pairs of all members totally. Exchanges in this order cannot deadlock:
    among all pairs that are not done, the pair with the least key is the next one of both its members.

    Two peers of a member differ in their XOR. Pairs with one XOR therefore have no member in common, and can run at the
    same time. If 2^n members all exchange with each other, they need 2^n - 1 such rounds, the fewest possible. Chains
    of pairs that wait for each other are short if members exchange with their neighbours: pairs (a, a + 1) with an even
    a have the smallest XOR of all.

    Pairs between nodes come first, because they are slow. If nodes have 2^k members with consecutive numbers, the
    members of a node exchange with different members of one other node in each round, so all network cards work. Pairs
    inside a node follow. Those that read accelerator memory run in parallel.
    """
    mine = nodes.get(me)
    return sorted({*peers}, key=lambda peer: (nodes.get(peer) == mine, peer ^ me))


@dataclass(frozen=True, eq=False)
class Exchange:
    """The moves between a member and a peer in one round.

    peer: the number of the other member.
    sends: moves from this member to the peer.
    receives: moves from the peer to this member; equal to the peer's `sends`, row by row.
    """

    peer: int
    sends: Moves
    receives: Moves


@dataclass(frozen=True, eq=False)
class MemberPlan:
    """The moves that one member carries out in a switch.

    local: copies from the member's own source buffers, made before these are released.
    derived: casts from the member's own target buffers, made after all other moves.
    rounds: exchanges with peers, in order. Peers with which nothing is exchanged are left out.
    relays: exchanges inside the node, after all rounds. They read the sender's target buffers, which the rounds have
        filled.
    """

    member: int
    local: Moves
    derived: Moves
    rounds: tuple[Exchange, ...]
    relays: tuple[Exchange, ...] = ()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges with peers in all rounds, followed by those of relays."""
        return self.rounds + self.relays

    def only(self, kinds: Collection[str]) -> MemberPlan:
        """Return the part of the plan that moves the given state kinds.

        All members must select the same kinds, so that their plans still fit together.
        """
        rounds, relays = (
            tuple(busy([Exchange(each.peer, each.sends.only(kinds), each.receives.only(kinds)) for each in phase]))
            for phase in (self.rounds, self.relays)
        )
        return MemberPlan(self.member, self.local.only(kinds), self.derived.only(kinds), rounds, relays)


def busy(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Return the exchanges that move something."""
    return [each for each in exchanges if len(each.sends) or len(each.receives)]


def split(
    exchanges: Iterable[Exchange],
    members: Collection[int],
    kinds: Collection[str],
    into: Collection[str] | None = None,
) -> tuple[list[Exchange], list[Exchange]]:
    """Split exchanges into (exchanges of all other moves, exchanges of the selected moves).

    The selected moves are those with peers in `members` that read buffers of `kinds`; the caller sends them another way
    than as messages through the host. The plans of two members stay consistent if each is in the other's `members` and
    both pass the same kinds.

    into: the state kinds of the target buffers; None for all.
    """
    rest, apart = [], []
    for each in exchanges:
        chosen = kinds if each.peer in members else ()
        (sent, sends), (received, receives) = each.sends.split(chosen, into), each.receives.split(chosen, into)
        rest.append(Exchange(each.peer, sent, received))
        apart.append(Exchange(each.peer, sends, receives))
    return busy(rest), busy(apart)


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """The moves of a whole switch.

    The object is small: the moves of a member are computed from `sides` on request.
    """

    sides: Sides

    @property
    def target_members(self) -> tuple[int, ...]:
        """The members after the switch, in the order of their ranks."""
        return self.sides.members

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state kinds that move."""
        return self.sides.names

    @property
    def kinds_after(self) -> tuple[str, ...]:
        """Names of the state kinds that exist after the switch: gradients are allocated even if none moves."""
        vps, layout = self.sides.vps, self.sides.layout
        others = (kind for kind in vps.present_kinds(layout) if row_of(kind).is_gradient and kind not in self.kinds)
        return *self.kinds, *others

    @property
    def members(self) -> tuple[int, ...]:
        """The members before or after the switch, in ascending order."""
        return tuple(sorted({*self.sides.vps.members, *self.sides.members}))

    def for_member(self, member: int) -> MemberPlan:
        """Return the moves of a member; they are empty for a member that takes no part in the switch.

        Elements that the member already holds are copied locally, or stay in place. A weight is cast from its master if
        the rank has the master after the switch; a master is never sent for this purpose. All other elements are
        received, each once.
        """
        sides = self.sides
        source_rank, rank = sides.source_rank.get(member, ABSENT), sides.target_rank.get(member, ABSENT)
        local, derived, received, sent = list[Ints](), list[Ints](), list[Ints](), list[Ints]()
        relayed = list[Ints]()
        for kinds in sides.alike():
            kind, read = kinds[0], sides.read_from(kinds[0])
            if rank != ABSENT:
                needs = sides.needs(kind, rank, source_rank)
                for name, (start, stop) in needs.local:
                    own = np.full_like(start, source_rank), np.full_like(start, rank)
                    local.append(for_all(sides, kinds, runs(sides, kind, name, start, stop, *own)))
                for name, (start, stop) in needs.derived:
                    own = np.full_like(start, rank), np.full_like(start, rank)
                    derived.append(for_all(sides, kinds, runs(sides, kind, name, start, stop, *own, is_derived=True)))
                (start, stop, sender), relays = sides.deliveries(kind, rank, needs.remote)
                found = runs(sides, kind, read, start, stop, sender, np.full_like(sender, rank))
                received.append(for_all(sides, kinds, found))
                found = runs(sides, kind, kind.name, *relays, is_derived=True)
                relayed.append(for_all(sides, kinds, found))
            if source_rank != ABSENT:
                start, stop, receiver = sides.receivers(kind, source_rank)
                found = runs(sides, kind, read, start, stop, np.full_like(receiver, source_rank), receiver)
                sent.append(for_all(sides, kinds, found))
        direct = self._exchanges(member, moves(sides, sent), moves(sides, received))
        passed = moves(sides, relayed, is_derived=True)
        out, into = (np.flatnonzero(end == member) for end in (passed.source, passed.target))
        inside = self._exchanges(member, passed.select(out), passed.select(into))
        return MemberPlan(member, moves(sides, local), moves(sides, derived, is_derived=True), direct, inside)

    def _exchanges(self, member: int, sends: Moves, receives: Moves) -> tuple[Exchange, ...]:
        """Return the exchanges of a member's moves.

        sends, receives: the moves, sorted by peer.
        """
        exchanges, peers = [], {*sends.target.tolist(), *receives.source.tolist()}
        for peer in rounds(peers, member, self.sides.nodes):
            mine = sends.select(slice(*np.searchsorted(sends.target, [peer, peer + 1])))
            theirs = receives.select(slice(*np.searchsorted(receives.source, [peer, peer + 1])))
            exchanges.append(Exchange(peer, mine, theirs))
        return tuple(exchanges)


def plan_switch(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    target_members: Iterable[int],
    kinds: Iterable[str] | None = None,
    held_as: Mapping[str, str] = AS_LAID_OUT,
    nodes: Mapping[int, str] = ANYWHERE,
) -> SwitchPlan:
    """Return the plan that moves the state from the current layout and members of `vps` to the target.

    kinds: the state kinds that exist at the source (no moments before the first step); None for all kinds that its
    layout holds.
    held_as: a map from a kind to the kind whose partitioning it has at the source, such as {"weight": "master"} if
    weights are read from buffers to which masters were cast.
    nodes: the node of each member, the same on all members, so that members read from their own nodes first.

    Raises LayoutError if the members do not fill the world or an axis is not supported, and SwitchRefused for a kind
    that no member holds.
    """
    names = vps.present_kinds() if kinds is None else kinds
    return SwitchPlan(Sides(vps, target_layout, tuple(target_members), tuple(map(vps.kind, names)), held_as, nodes))


# ---- stand-ins -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StandInPlan:
    """The plans that one member, the stand-in, carries out for itself and for absent members whose state it holds.

    If another member holds the state of an absent one, the switch plan still names the absent member, by a number that
    no current member has. Shardings and rounds stay the same; only the member that carries the moves out changes.

    own: the plan of the stand-in itself.
    absent: the plan of each member that it stands in for. Moves from such a member to the stand-in are local moves,
    which write to the stand-in's target buffers.
    """

    own: MemberPlan
    absent: Mapping[int, MemberPlan]


def standing_in(plan: SwitchPlan, member: int, absent: Iterable[int]) -> StandInPlan:
    """Return the plans that a member carries out for itself and for absent members.

    Raises LayoutError if an absent member has a rank in the target, where no other member can act for it.
    """
    played = tuple(absent)
    wrong = sorted(set(played) & set(plan.target_members))
    if wrong:
        raise LayoutError(
            f"member {wrong[0]} is in the target, so member {member} cannot stand in for it; name members that are "
            "not in the target"
        )
    own, parts = plan.for_member(member), dict[int, MemberPlan]()
    own = replace(own, rounds=tuple(each for each in own.rounds if each.peer not in played))
    for one in played:
        part = plan.for_member(one)  # it has no local moves, because it is not in the target
        to_member = next((each.sends for each in part.rounds if each.peer == member), part.local)
        away = tuple(each for each in part.rounds if each.peer != member)
        parts[one] = replace(part, local=to_member, rounds=away)
    return StandInPlan(own, parts)
