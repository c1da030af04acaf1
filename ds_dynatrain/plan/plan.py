"""The plan of a switch: every move between two (layout, members), as each member sees it, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan import moves
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.sides import AS_LAID_OUT, Sides, senders_of
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


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """Every move of a switch. Light: a member's moves are computed from the two sides when asked for."""

    sides: Sides

    @property
    def source_members(self) -> tuple[int, ...]:
        """The members before the switch, in rank order."""
        return self.sides.vps.members

    @property
    def target_members(self) -> tuple[int, ...]:
        """The members after the switch, in rank order."""
        return self.sides.members

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state kinds that move."""
        return tuple(kind.name for kind in self.sides.kinds)

    @property
    def members(self) -> tuple[int, ...]:
        """Members with a part in the switch, ascending: the members of both sides."""
        return tuple(sorted({*self.source_members, *self.target_members}))

    def for_member(self, member: int) -> MemberPlan:
        """Return the member's moves and rounds; empty for a member on neither side."""
        local, derived = moves.at_home(self.sides, member)
        if member not in self.members:
            return MemberPlan(member, local, derived, ())
        sends, receives = moves.sends(self.sides, member), moves.receives(self.sides, member)
        busy = {*sends.target.tolist(), *receives.source.tolist()}
        exchanges = tuple(
            Exchange(peer, _of(sends, sends.target, peer), _of(receives, receives.source, peer))
            for peer in rounds(self.members, member)
            if peer is not None and peer in busy
        )
        return MemberPlan(member, local, derived, exchanges)

    @cached_property
    def traffic(self) -> dict[int, tuple[int, int]]:
        """Bytes (sent, received) of each member."""
        ranks = len(self.source_members)
        sent, received = np.zeros(ranks, np.int64), dict.fromkeys(self.members, 0)
        for rank, member in enumerate(self.target_members):
            for kind in self.sides.kinds:
                start, stop = self.sides.wanted(kind, rank, int(self.sides.source_ranks[rank]))
                low, high, sender = senders_of(self.sides, kind, rank, start, stop)
                received[member] += int((high - low).sum()) * kind.itemsize
                np.add.at(sent, sender, (high - low) * kind.itemsize)
        by_member = dict(zip(self.source_members, sent.tolist(), strict=True))
        return {member: (by_member.get(member, 0), received[member]) for member in self.members}

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes that cross between members, in total."""
        return sum(sent for sent, _ in self.traffic.values())

    @cached_property
    def bytes_busiest(self) -> int:
        """Bytes in the busiest direction of the busiest member, which all others wait for."""
        return max((max(both) for both in self.traffic.values()), default=0)


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


def _of(all_moves: Moves, peers: Ints, peer: int) -> Moves:
    """Return the moves with one peer; `peers` is sorted."""
    first, last = np.searchsorted(peers, [peer, peer + 1])
    return all_moves.select(slice(int(first), int(last)))


# ---- rounds ----------------------------------------------------------------------------------------------------------


def rounds(members: Iterable[int], me: int) -> tuple[int | None, ...]:
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
    place = circle.index(me)
    if place == count:
        return tuple(circle[_opposite_fixed(round_number, count)] for round_number in range(count))
    return tuple(circle[_opponent(place, round_number, count)] for round_number in range(count))


def _opponent(place: int, round_number: int, count: int) -> int:
    """Return whom a moving place meets: a and b meet in round r if a + b = r modulo count; a = b meets the fixed."""
    other = (round_number - place) % count
    return count if other == place else other


def _opposite_fixed(round_number: int, count: int) -> int:
    """Return the place a with 2a = r modulo count (count is odd)."""
    return round_number * (count + 1) // 2 % count


# ---- stand-ins -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StandInPlan:
    """The parts that one member carries out for itself and for absent members whose state it holds.

    A plan names who holds what at the source. If another member has what an absent one held, the plan still names the
    absent one, by a number that no living member has: shardings and rounds stay the same, and only the acting member
    changes.

    own: its own part. absent: the part of each member that it stands in for; moves from such a member to the stand-in
    are among its local moves, which write the stand-in's target buffers.
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
    own = plan.for_member(member)
    own = replace(own, rounds=tuple(each for each in own.rounds if each.peer not in played))
    return StandInPlan(own, {one: _part(plan.for_member(one), member) for one in played})


def _part(part: MemberPlan, member: int) -> MemberPlan:
    """Return the part with the moves to `member` as local moves."""
    to_member = [each.sends for each in part.rounds if each.peer == member]
    away = tuple(each for each in part.rounds if each.peer != member)
    return replace(part, local=Moves.concatenate(to_member, part.local), rounds=away)


# ---- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """An estimate of a switch. bytes_sent: over all members. peak_bytes: by member, state of both sides and the budget.

    seconds: time of the busiest direction of the busiest member at the given bandwidth.
    """

    bytes_sent: int
    peak_bytes: dict[int, int]
    seconds: float

    @property
    def highest_peak_bytes(self) -> int:
        """Peak of the member with the highest one, in bytes."""
        return max(self.peak_bytes.values(), default=0)


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the cost with at most `budget_bytes` packed in flight per member, at `bytes_per_second` each way."""
    sides = plan.sides
    fresh = {kind for kind in sides.vps.present_kinds(sides.layout) if row_of(kind).is_gradient}
    kinds = (*plan.kinds, *sorted(fresh - set(plan.kinds)))  # allocated at the target even if none moves
    peak = {}
    for member in plan.members:
        busy = sum(plan.traffic[member])
        before = state_bytes(sides.vps, sides.vps.layout, sides.source_rank.get(member, ABSENT), plan.kinds)
        after = state_bytes(sides.vps, sides.layout, sides.target_rank.get(member, ABSENT), kinds)
        peak[member] = before + after + min(budget_bytes, busy)
    return Cost(plan.bytes_sent, peak, plan.bytes_busiest / bytes_per_second)


def state_bytes(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: tuple[str, ...]) -> int:
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
