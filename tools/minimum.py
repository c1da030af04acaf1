"""The fewest bytes that a switch can move, counted element by element, and the sums of a plan.

`bytes_minimum` is a slow, direct count that shares only the pieces on each rank with the planner. Tests and benchmarks
compare plans with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from ds_dynatrain.plan import SwitchPlan, picture_of
from ds_dynatrain.space import Kind, Layout, VirtualParameterSpace
from ds_dynatrain.space.interval import Ints, Runs

Marks = npt.NDArray[np.bool_]


def bytes_minimum(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    target_members: Iterable[int],
    kinds: Iterable[str] | None = None,
) -> int:
    """Return the bytes that must be sent between members, whatever the plan.

    A rank must receive an element once if it needs it in some kind of equal bytes, its member holds it in none of these
    kinds, and the rank will not hold the kind from which it can be cast. Needs a few bytes of memory for each element
    of the model.
    """
    names = vps.present_kinds() if kinds is None else tuple(kinds)
    total = 0
    for rank, member in enumerate(target_members):
        for group in _equal_kinds([vps.kind(name) for name in names]):
            missing = _marks(vps, target_layout, rank, [kind.name for kind in group])
            if member in vps.members:
                missing &= ~_marks(vps, vps.layout, vps.members.index(member), [kind.name for kind in group])
            inside = {kind.name for kind in group}
            for kind in group:
                if kind.derived_from in names and kind.derived_from not in inside:
                    missing &= ~_marks(vps, target_layout, rank, [kind.derived_from])
            total += int(np.count_nonzero(missing)) * group[0].itemsize
    return total


def bytes_sent(plan: SwitchPlan) -> int:
    """Return the bytes that all members send according to the picture of a plan."""
    return int(picture_of(plan).gives.sum())


def traffic(plan: SwitchPlan) -> dict[int, tuple[int, int]]:
    """Return a map from member to the bytes that it (sends, receives) according to the picture of a plan."""
    found = picture_of(plan)
    both = zip(found.gives.tolist(), found.takes.tolist(), strict=True)
    return dict(zip(plan.members, both, strict=True))


def least_busiest(plan: SwitchPlan, nodes: Mapping[int, str]) -> float:
    """Bytes of the first kind that the busiest member must send, if replicas are read by the rule for nodes.

    What a member of a receiver's node holds is read there. Anything else crosses to each node once, from any holder,
    and one of the members that need it passes it on to the others. A linear program divides it among all who may.
    nodes: the node of each member; a member that is not in it is alone on its node.
    """
    sides, kind = plan.sides, plan.sides.kinds[0]
    source = sides.source(kind.name)
    held = {member: Runs(*source.holding(rank).columns[:2]) for rank, member in enumerate(sides.vps.members)}
    ranks = zip(sides.members, range(len(sides.members)), sides.source_ranks.tolist(), strict=True)
    wanted = {member: sides.needs(kind, rank, before).remote for member, rank, before in ranks}
    edges = np.unique(np.concatenate([end for runs in (*held.values(), *wanted.values()) for end in runs]))
    middle = edges[:-1] + np.diff(edges) // 2
    nbytes = dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
    has, needs = ({member: _covers(*runs, middle) for member, runs in side.items()} for side in (held, wanted))
    for part, size in enumerate((np.diff(edges) * kind.itemsize).tolist()):
        holders, takers = (tuple(member for member in side if side[member][part]) for side in (has, needs))
        nbytes[holders, takers] = nbytes.get((holders, takers), 0) + size
    share, totals = list[tuple[int, int, int]](), list[int]()  # (member, what it sends of each byte, which total)
    for (holders, takers), size in nbytes.items():
        for node in {nodes.get(member, str(member)) for member in takers}:
            here = [member for member in takers if nodes.get(member, str(member)) == node]
            near = [member for member in holders if nodes.get(member, str(member)) == node]
            share += [(member, 1, len(totals)) for member in near or holders]
            totals.append(size * len(here) if near else size)
            if not near and len(here) > 1:
                share += [(member, len(here) - 1, len(totals)) for member in here]
                totals.append(size)
    if not totals:
        return 0.0
    member, weight, number = map(np.array, zip(*share, strict=True))
    _, sender = np.unique(member, return_inverse=True)
    column, count = np.arange(len(share)), int(sender.max()) + 1
    rows = np.append(sender, np.arange(count)), np.append(column, np.full(count, len(share)))
    found = linprog(
        np.append(np.zeros(len(share)), 1),
        A_ub=coo_array((np.append(weight, -np.ones(count)), rows)).tocsr(),
        b_ub=np.zeros(count),
        A_eq=coo_array((np.ones(len(share)), (number, column)), (len(totals), len(share) + 1)).tocsr(),
        b_eq=np.array(totals) / max(totals),
    )
    return float(found.fun) * max(totals)


def busiest_ratio(plan: SwitchPlan, nodes: Mapping[int, str]) -> float:
    """What the busiest member sends, over the most of: what one has to receive, the mean, and what one has to send."""
    found = picture_of(plan)
    needed = max(found.takes.max(), found.gives.mean(), least_busiest(plan, nodes))
    return float(found.gives.max() / needed) if needed else 0.0


def _covers(start: Ints, stop: Ints, places: Ints) -> Marks:
    """Whether disjoint sorted runs cover places."""
    at = np.searchsorted(start, places, side="right") - 1
    covered: Marks = (at >= 0) & (places < stop[at]) if len(start) else np.zeros(len(places), dtype=bool)
    return covered


def _marks(vps: VirtualParameterSpace, layout: Layout, rank: int, names: Iterable[str]) -> Marks:
    """Return which coordinates the rank holds in any of these kinds."""
    marks = np.zeros(len(vps.line), dtype=bool)
    for name in names:
        for piece in vps.holding(layout, rank, name):
            marks[piece.start : piece.stop] = True
    return marks


def _equal_kinds(kinds: list[Kind]) -> list[list[Kind]]:
    """Return the kinds, grouped by equal bytes."""
    groups: list[list[Kind]] = []
    for kind in kinds:
        near = [
            group
            for group in groups
            if any(kind.name in other.sources or other.name in kind.sources for other in group)
        ]
        groups = [group for group in groups if group not in near]
        groups.append([kind, *(other for group in near for other in group)])
    return groups
