"""The fewest bytes that a switch can move, counted element by element, and the sums of a plan.

`bytes_minimum` is a slow, direct count that shares only the pieces on each rank with the planner. Tests and benchmarks
compare plans with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ds_dynatrain.plan import SwitchPlan, picture_of
from ds_dynatrain.space import Kind, Layout, VirtualParameterSpace

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
