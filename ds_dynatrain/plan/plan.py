"""The plan of a switch: all moves from one layout and set of members to another, per member, and their cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.moves import Moves, between, joined, within
from ds_dynatrain.plan.sides import AS_LAID_OUT, Sides
from ds_dynatrain.space import ABSENT, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.space.interval import Ints


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
    rounds: exchanges with peers, in order. Both members omit a round in which neither sends a byte.
    """

    member: int
    local: Moves
    derived: Moves
    rounds: tuple[Exchange, ...]

    def only(self, kinds: Collection[str]) -> MemberPlan:
        """Return the part of the plan that moves the given state kinds.

        All members must select the same kinds, so that their plans still fit together.
        """
        exchanges = [Exchange(each.peer, each.sends.only(kinds), each.receives.only(kinds)) for each in self.rounds]
        busy = tuple(each for each in exchanges if len(each.sends) or len(each.receives))
        return MemberPlan(self.member, self.local.only(kinds), self.derived.only(kinds), busy)

    def split(
        self, members: Collection[int], kinds: Collection[str], into: Collection[str] | None = None
    ) -> tuple[MemberPlan, list[Exchange]]:
        """Return (the plan without the separated exchanges, these exchanges).

        An exchange is separated if its peer is in `members` and it reads source buffers of `kinds`; separated exchanges
        do not use messages through the host. The plans of two members stay consistent if each is in the other's
        `members` and both pass the same kinds.

        into: the state kinds of the target buffers; None for all.
        """
        rest, apart = [], []
        for each in self.rounds:
            if each.peer not in members:
                rest.append(each)
                continue
            (sent, sends), (received, receives) = each.sends.split(kinds, into), each.receives.split(kinds, into)
            if len(sent) or len(received):
                rest.append(Exchange(each.peer, sent, received))
            if len(sends) or len(receives):
                apart.append(Exchange(each.peer, sends, receives))
        return replace(self, rounds=tuple(rest)), apart


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
        for kind in sides.kinds:
            if rank != ABSENT:
                needs = sides.needs(kind, rank, source_rank)
                for found, into in ((needs.local, local), (needs.derived, derived)):
                    for each in found:
                        into.append(within(sides, member, kind, *each))
                start, stop, sender = sides.senders(kind, rank, needs.remote)
                received.append(between(sides, kind, start, stop, sender, np.full_like(sender, rank)))
            if source_rank != ABSENT:
                start, stop, receiver = sides.receivers(kind, source_rank)
                sent.append(between(sides, kind, start, stop, np.full_like(receiver, source_rank), receiver))
        sends, receives = joined(sides, sent), joined(sides, received)  # sorted by peer
        busy = {*sends.target.tolist(), *receives.source.tolist()}
        exchanges = []
        for peer in rounds(self.members, member) if busy else ():
            if peer is not None and peer in busy:
                mine = sends.select(slice(*np.searchsorted(sends.target, [peer, peer + 1])))
                theirs = receives.select(slice(*np.searchsorted(receives.source, [peer, peer + 1])))
                exchanges.append(Exchange(peer, mine, theirs))
        return MemberPlan(member, joined(sides, local), joined(sides, derived, is_derived=True), tuple(exchanges))

    @cached_property
    def traffic(self) -> dict[int, tuple[int, int]]:
        """A map from member to the numbers of bytes that it (sends, receives)."""
        sides, found = self.sides, dict[int, tuple[int, int]]()
        sent, received = np.zeros(len(sides.vps.members), np.int64), np.zeros(len(sides.members), np.int64)
        for rank in range(len(sides.members)):
            for kind in sides.kinds:
                needs = sides.needs(kind, rank, int(sides.source_ranks[rank]))
                start, stop, sender = sides.senders(kind, rank, needs.remote)
                received[rank] += (stop - start).sum() * kind.itemsize
                np.add.at(sent, sender, (stop - start) * kind.itemsize)
        for member in self.members:
            source_rank, rank = sides.source_rank.get(member, ABSENT), sides.target_rank.get(member, ABSENT)
            gives = int(sent[source_rank]) if source_rank != ABSENT else 0
            found[member] = gives, int(received[rank]) if rank != ABSENT else 0
        return found

    @property
    def bytes_sent(self) -> int:
        """Total bytes sent between members."""
        return sum(sent for sent, _ in self.traffic.values())


def plan_switch(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    target_members: Iterable[int],
    kinds: Iterable[str] | None = None,
    held_as: Mapping[str, str] = AS_LAID_OUT,
) -> SwitchPlan:
    """Return the plan that moves the state from the current layout and members of `vps` to the target.

    kinds: the state kinds that exist at the source (no moments before the first step); None for all kinds that its
    layout holds.
    held_as: a map from a kind to the kind whose partitioning it has at the source, such as {"weight": "master"} if
    weights are read from buffers to which masters were cast.

    Raises LayoutError if the members do not fill the world or an axis is not supported, and SwitchRefused for a kind
    that no member holds.
    """
    names = vps.present_kinds() if kinds is None else kinds
    return SwitchPlan(Sides(vps, target_layout, tuple(target_members), tuple(map(vps.kind, names)), held_as))


def rounds(members: Iterable[int], me: int) -> list[int | None]:
    """Return the peer of `me` in each round, or None in a round in which `me` has no peer.

    The schedule is a round-robin tournament by the circle method (T. P. Kirkman, 1847): one member is fixed, and the
    others rotate around it. Each pair meets once. All members go through the rounds in the same order and exchange in
    both directions at once, so they cannot deadlock.

    n members need n - 1 rounds if n is even and n if it is odd. All callers must pass the same set, in any order. Raise
    ValueError if `me` is not among `members`.
    """
    circle: list[int | None] = [*sorted(set(members))]
    if me not in circle:
        raise ValueError(f"member {me} is not among {circle}")
    if len(circle) % 2:
        circle.append(None)
    count = len(circle) - 1
    place, numbers = circle.index(me), np.arange(count)
    if place == count:  # the fixed member meets, in round r, the place a with 2a = r modulo count (count is odd)
        opponents = numbers * (count + 1) // 2 % count
    else:  # places a and b meet in round r if a + b = r modulo count; if a = b, a meets the fixed member
        opponents = (numbers - place) % count
        opponents[opponents == place] = count
    return [circle[opponent] for opponent in opponents.tolist()]


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
    """Return the plans of a member and of the absent members for which it acts.

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
        part = plan.for_member(one)  # it has no local moves, as it is not in the target
        to_member = next((each.sends for each in part.rounds if each.peer == member), part.local)
        away = tuple(each for each in part.rounds if each.peer != member)
        parts[one] = replace(part, local=to_member, rounds=away)
    return StandInPlan(own, parts)


# ---- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a switch.

    bytes_sent: the total over all members.
    bytes_busiest: bytes in the busiest direction of the busiest member, for which all others wait.
    highest_peak_bytes: the largest of `peak_bytes`.
    peak_bytes: for each member, the bytes of its state before and after the switch plus its bytes in flight.
    seconds: the time to transfer `bytes_busiest` at the given bandwidth.
    """

    bytes_sent: int
    bytes_busiest: int
    highest_peak_bytes: int
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the estimated cost of a plan.

    budget_bytes: the maximum number of bytes in flight per member.
    bytes_per_second: the bandwidth of a member in each direction.
    """
    sides, kinds = plan.sides, plan.sides.names
    after = list(kinds)
    for kind in sides.vps.present_kinds(sides.layout):  # gradients are allocated at the target even if none moves
        if row_of(kind).is_gradient and kind not in kinds:
            after.append(kind)
    peak, bytes_sent, busiest = {}, 0, 0
    for member, (sent, received) in plan.traffic.items():
        bytes_sent, busiest = bytes_sent + sent, max(busiest, sent, received)
        source = state_bytes(sides.vps, sides.vps.layout, sides.source_rank.get(member, ABSENT), kinds)
        target = state_bytes(sides.vps, sides.layout, sides.target_rank.get(member, ABSENT), after)
        peak[member] = source + target + min(budget_bytes, sent + received)
    return Cost(bytes_sent, busiest, max(peak.values(), default=0), peak, busiest / bytes_per_second)


def state_bytes(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: Collection[str]) -> int:
    """Return the bytes of the given state kinds on a rank (0 if ABSENT), without padding.

    A weight and its master are counted once if they share a buffer (stages 0 and 3 in fp32).
    """
    if rank == ABSENT:
        return 0
    total = 0
    for name in kinds:
        kind = vps.kind(name)
        pieces = vps.holding(layout, rank, name)
        if kind.derived_from in kind.sources and kind.derived_from in kinds and layout.zero_stage in (0, 3):
            shared = vps.holding(layout, rank, str(kind.derived_from))
            pieces = pieces.subtract(shared.start, shared.stop)
        total += pieces.numel * kind.itemsize
    return total
