"""The plan of a switch: every move between two (layout, members), as each member sees it, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.moves import Moves, between, joined, within
from ds_dynatrain.plan.sides import AS_LAID_OUT, Sides
from ds_dynatrain.space import ABSENT, Layout, VirtualParameterSpace, row_of
from ds_dynatrain.space.interval import Ints


@dataclass(frozen=True, eq=False)
class Exchange:
    """The moves between a member and a peer in one round; the peer's `sends` are this `receives`, row by row."""

    peer: int
    sends: Moves
    receives: Moves


@dataclass(frozen=True, eq=False)
class MemberPlan:
    """A member's part of a switch.

    local: copies from its own source buffers (read before they are released). rounds: exchanges in order; a round
    without a byte in either direction is left out at both ends. derived: casts from its own target buffers, after
    everything else.
    """

    member: int
    local: Moves
    derived: Moves
    rounds: tuple[Exchange, ...]

    def only(self, kinds: Collection[str]) -> MemberPlan:
        """Return the part that moves some kinds; the same kinds of all members' parts make a plan again."""
        exchanges = [Exchange(each.peer, each.sends.only(kinds), each.receives.only(kinds)) for each in self.rounds]
        busy = tuple(each for each in exchanges if len(each.sends) or len(each.receives))
        return MemberPlan(self.member, self.local.only(kinds), self.derived.only(kinds), busy)

    def split(
        self, members: Collection[int], kinds: Collection[str], into: Collection[str] | None = None
    ) -> tuple[MemberPlan, list[Exchange]]:
        """Return the rest of the part, and the moves between this member and `members` from buffers of `kinds`.

        They go another way than by messages over the host. into: kinds of the target buffers; None for all. Both ends
        of a pair split their parts alike if each has the other among its `members`, and the kinds are the same.
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
    """Every move of a switch. Light: a member's moves are computed from the two sides when asked for."""

    sides: Sides

    @property
    def target_members(self) -> tuple[int, ...]:
        """The members after the switch, in rank order."""
        return self.sides.members

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state kinds that move."""
        return self.sides.names

    @property
    def members(self) -> tuple[int, ...]:
        """Members with a part in the switch, ascending: the members of both sides."""
        return tuple(sorted({*self.sides.vps.members, *self.sides.members}))

    def for_member(self, member: int) -> MemberPlan:
        """Return the member's moves and rounds; empty for a member on neither side.

        Bytes that the member holds are copied, or are in place already. A weight is cast from the master that the rank
        has after the switch, and a master is never sent for that alone. The rest is received, each element once.
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
        """Bytes (sent, received) of each member."""
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
        """Bytes that cross between members, in total."""
        return sum(sent for sent, _ in self.traffic.values())


def plan_switch(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    target_members: Iterable[int],
    kinds: Iterable[str] | None = None,
    held_as: Mapping[str, str] = AS_LAID_OUT,
) -> SwitchPlan:
    """Return the plan that takes the space from its present layout and members to the target's.

    kinds: names of the kinds present at the source (no moments before the first step); if None, all that its layout
    holds. held_as: kinds that lie at the source cut as another kind of the same tensors: {"weight": "master"} if
    weights are read from the buffers that masters were cast to. Raise LayoutError if the members do not fill the world
    or an axis is not supported, SwitchRefused for a kind that no member has.
    """
    names = vps.present_kinds() if kinds is None else kinds
    return SwitchPlan(Sides(vps, target_layout, tuple(target_members), tuple(map(vps.kind, names)), held_as))


def rounds(members: Iterable[int], me: int) -> list[int | None]:
    """Return the peer of `me` in every round, None where it rests; each pair meets once, and waits form no circle.

    The round-robin tournament by the circle method (T. P. Kirkman, 1847): one member stands still, the others step
    around it. All have a peer or rest in the same round, so an exchange in both directions at once never deadlocks.

    n members need n - 1 rounds if n is even and n if it is odd; `members` may be in any order, but all callers pass the
    same set. Raise ValueError if `me` is not in it.
    """
    circle: list[int | None] = [*sorted(set(members))]
    if me not in circle:
        raise ValueError(f"member {me} is not among {circle}")
    if len(circle) % 2:
        circle.append(None)
    count = len(circle) - 1
    place, numbers = circle.index(me), np.arange(count)
    if place == count:  # it stands still, and meets the place a with 2a = r modulo count (count is odd) in round r
        opponents = numbers * (count + 1) // 2 % count
    else:  # places a and b meet in round r if a + b = r modulo count; a = b meets the one that stands still
        opponents = (numbers - place) % count
        opponents[opponents == place] = count
    return [circle[opponent] for opponent in opponents.tolist()]


# ---- stand-ins -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StandInPlan:
    """The parts that one member carries out for itself and for absent members whose state it holds.

    A plan names who holds what at the source. If another member has what an absent one held, the plan still names the
    absent one, by a number that no living member has: shardings and rounds stay the same, and only the acting member
    changes.

    own: its own part. absent: the part of each member that it stands in for; moves from such a member to the stand-in
    are its local moves, which write the stand-in's target buffers.
    """

    own: MemberPlan
    absent: Mapping[int, MemberPlan]


def standing_in(plan: SwitchPlan, member: int, absent: Iterable[int]) -> StandInPlan:
    """Return the parts of a member and of the absent members that it stands in for.

    Raise LayoutError for an absent member in the target: nobody can stand in for it there.
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
    """An estimate of a switch. bytes_sent: over all members. peak_bytes: by member, state of both sides and the budget.

    bytes_busiest: in the busiest direction of the busiest member, which all others wait for. seconds: the time that
    takes at the given bandwidth.
    """

    bytes_sent: int
    bytes_busiest: int
    peak_bytes: dict[int, int]
    seconds: float

    @property
    def highest_peak_bytes(self) -> int:
        """Peak of the member with the highest one, in bytes."""
        return max(self.peak_bytes.values(), default=0)


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the cost with at most `budget_bytes` packed in flight per member, at `bytes_per_second` each way."""
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
    return Cost(bytes_sent, busiest, peak, busiest / bytes_per_second)


def state_bytes(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: Collection[str]) -> int:
    """Return the bytes of the kinds on a rank (0 if ABSENT), without padding.

    A weight that has the bytes of its master is counted once if both have the same buffer (stages 0 and 3 in fp32).
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
