"""The plan of a switch: every move between two (layout, members), as each member sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_dynatrain.plan import need
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.rounds import rounds
from ds_dynatrain.plan.senders import senders_of
from ds_dynatrain.plan.sides import AS_LAID_OUT, Sides
from ds_dynatrain.space import Layout, VirtualParameterSpace
from ds_dynatrain.space.tensor import Ints


@dataclass(frozen=True, eq=False)
class Exchange:
    """What a member and a peer send each other in one round; the peer's `sends` are its `receives`, row by row."""

    peer: int
    sends: Moves
    receives: Moves


@dataclass(frozen=True, eq=False)
class MemberPlan:
    """A member's part of a switch.

    local: copies from its own source buffers (read before they are released). rounds: exchanges in order; a round
    without a byte in either direction is left out at both ends. derived: after all else, from its own target buffers.
    """

    member: int
    local: Moves
    derived: Moves
    rounds: tuple[Exchange, ...]

    def only(self, kinds: Collection[str]) -> MemberPlan:
        """The moves of some kinds: again a part of a plan, whose other parts are those of these kinds."""
        exchanges = [Exchange(each.peer, each.sends.only(kinds), each.receives.only(kinds)) for each in self.rounds]
        busy = tuple(each for each in exchanges if len(each.sends) or len(each.receives))
        return MemberPlan(self.member, self.local.only(kinds), self.derived.only(kinds), busy)


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """Every move of a switch. Light: a member's moves are computed when asked for, from the two sides alone."""

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
        """All members with a part in the switch, ascending: those of both sides."""
        return tuple(sorted({*self.source_members, *self.target_members}))

    def for_member(self, member: int) -> MemberPlan:
        """The member's moves and rounds; nothing at all for one on neither side."""
        local, derived = need.at_home(self.sides, member)
        if member not in self.members:
            return MemberPlan(member, local, derived, ())
        sends, receives = need.sends(self.sides, member), need.receives(self.sides, member)
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
        """Bytes that cross between members, all together."""
        return sum(sent for sent, _ in self.traffic.values())

    @cached_property
    def bytes_busiest(self) -> int:
        """Bytes of the busiest direction of the busiest member: what the others wait for."""
        return max((max(both) for both in self.traffic.values()), default=0)


def plan_switch(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    target_members: Iterable[int],
    kinds: Iterable[str] | None = None,
    held_as: Mapping[str, str] = AS_LAID_OUT,
) -> SwitchPlan:
    """The plan that takes the space from its present layout and members to the target's.

    kinds: names of the kinds present at the source (no moments before the first step); all that its layout holds if
    None. held_as: kinds that lie at the source cut as another one of the same tensors: {"weight": "master"} where
    weights are read from what masters were cast to. LayoutError if the members do not fill the world or an axis is not
    supported; SwitchRefused for a kind nobody holds.
    """
    return SwitchPlan(Sides(vps, target_layout, tuple(target_members), kinds, held_as))


def _of(moves: Moves, peers: Ints, peer: int) -> Moves:
    """The moves with one peer; `peers` is sorted."""
    first, last = np.searchsorted(peers, [peer, peer + 1])
    return moves.select(slice(int(first), int(last)))
