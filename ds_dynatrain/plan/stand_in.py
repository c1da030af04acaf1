"""Stand-ins: a member of a plan carries out the parts of others that are not there, from what it holds of theirs.

A plan names who holds what at the source. Where somebody else has what an absent member held, the plan still names the
absent one, by a number that no living member has: shardings and rounds stay as they are, and only who acts is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.plan.plan import MemberPlan, SwitchPlan


@dataclass(frozen=True, eq=False)
class StandInPlan:
    """What one member carries out.

    own: its own part. absent: the part of each member that it stands in for; what such a one sends to the stand-in is
    among its local moves, which write the stand-in's target buffers.
    """

    own: MemberPlan
    absent: Mapping[int, MemberPlan]


def standing_in(plan: SwitchPlan, member: int, absent: Iterable[int]) -> StandInPlan:
    """The parts of a member and of those that it stands in for, who are in the source alone.

    LayoutError for one that is in the target, where nobody can stand in for it.
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
    """With what goes to `member` as local moves."""
    to_member = [each.sends for each in part.rounds if each.peer == member]
    away = tuple(each for each in part.rounds if each.peer != member)
    return replace(part, local=Moves.concatenate(to_member, part.local), rounds=away)
