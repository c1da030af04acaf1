"""Slots: which member takes which rank of the new world, so that the fewest bytes move.

The member at rank 0 keeps it if it stays. All others are assigned by the Hungarian method (scipy's
`linear_sum_assignment`) on the bytes that a member would receive in a slot. Among the cheapest assignments one is
chosen by a second run over those pairs alone that occur in some cheapest assignment, so the answer is the same on
every member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import ABSENT, Kind, Layout, VirtualParameterSpace, interval
from ds_dynatrain.space.sharding import Sharding
from ds_dynatrain.space.tensor import Ints
from ds_dynatrain.space.vps import AnySharding


def assign_slots(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    candidates: Iterable[int],
    node_of: Mapping[int, str] | None = None,
    kinds: Iterable[str] | None = None,
) -> tuple[int, ...]:
    """The members of the target in rank order.

    candidates: who may hold a slot; in a fixed set all processes, idle ones too. node_of: the node of each candidate;
    equal bytes go to members that work already, then to nodes that hold more of those, then to lower numbers, lower
    ranks to lower slots. LayoutError if there are fewer candidates than slots.
    """
    order = _preference(vps, candidates, node_of or {})
    slots = target_layout.world_size
    if len(order) < slots:
        raise LayoutError(
            f"{target_layout} has {slots} ranks and only {len(order)} members may take one: {sorted(order)}"
        )
    cost = slot_costs(vps, target_layout, order, kinds)
    if vps.members[0] in order:
        keeper = order.index(vps.members[0])
        rest = [row for row in range(len(order)) if row != keeper]
        chosen = [keeper, *(rest[row] for row in _cheapest(cost[rest, 1:]))]
    else:
        chosen = _cheapest(cost)
    return tuple(order[row] for row in chosen)


def slot_costs(
    vps: VirtualParameterSpace, target_layout: Layout, candidates: Iterable[int], kinds: Iterable[str] | None = None
) -> Ints:
    """Bytes that each candidate (row) would receive in each slot (column)."""
    slots = target_layout.world_size
    sides = Sides(vps, target_layout, range(slots), kinds)
    by_rank = np.zeros((vps.layout.world_size + 1, slots), dtype=np.int64)
    for kind in sides.kinds:
        for slot in range(slots):
            by_rank[:, slot] += _missing(sides, kind, slot) * kind.itemsize
    rows = [vps.members.index(member) if member in vps.members else ABSENT for member in candidates]
    return by_rank[rows]


def _missing(sides: Sides, kind: Kind, slot: int) -> Ints:
    """Elements of a kind that a slot lacks, for a member at each source rank, and last for one that was at none."""
    start, stop = sides.wanted(kind, slot, ABSENT)
    ranks = sides.vps.layout.world_size
    result = np.full(ranks + 1, int((stop - start).sum()), dtype=np.int64)
    names = sides.sources(kind)
    cuts = [sides.source(name, copies) for name in names for copies in (False, True)]
    for cut in cuts:
        if cut.replicated:
            _, start, stop = interval.subtract(start, stop, *cut.region())
    result[:ranks] = int((stop - start).sum())
    if not all(isinstance(cut, Sharding) for cut in cuts):
        return _missing_by_holder(cuts, start, stop, result)
    seen: list[Ints] = []
    for cut in cuts:
        if not cut.replicated and len(start):
            row, start, stop, owner = cut.owners(start, stop)
            seen = [earlier[row] for earlier in seen]
            fresh = np.all([owner != earlier for earlier in seen], axis=0) if seen else np.ones(len(owner), dtype=bool)
            np.subtract.at(result, owner[fresh], (stop - start)[fresh])
            seen.append(owner)
    return result


def _missing_by_holder(cuts: list[AnySharding], start: Ints, stop: Ints, result: Ints) -> Ints:
    """The same where an element may have several holders, each of which lacks it no more."""
    earlier: list[AnySharding] = []
    for cut in cuts:
        if cut.is_empty:
            continue
        _, low, high, rank = cut.holders(start, stop)
        for before in earlier:  # what a rank holds twice counts once
            row, low, high = before.lacking(low, high, rank)
            rank = rank[row]
        np.subtract.at(result, rank, high - low)
        earlier.append(cut)
    return result


def _preference(vps: VirtualParameterSpace, candidates: Iterable[int], node_of: Mapping[int, str]) -> list[int]:
    """Candidates, best first: working ones by rank, then the others by node and number."""
    members = set(candidates)
    working = [member for member in vps.members if member in members]
    busy = Counter(node_of.get(member, "") for member in working)
    idle = members.difference(working)
    return working + sorted(idle, key=lambda member: (-busy[node_of.get(member, "")], node_of.get(member, ""), member))


def _cheapest(cost: Ints) -> list[int]:
    """For each column the row assigned to it: least cost, and among those the earliest rows in their order."""
    rows, columns = cost.shape
    if not columns:
        return []
    square = np.zeros((rows, rows), dtype=np.int64)
    square[:, :columns] = cost
    taken = linear_sum_assignment(square)[1]
    tight = _tight(square, taken)
    wish = np.arange(rows, dtype=np.int64)[:, None]
    tie = (wish - np.arange(rows, dtype=np.int64)[None, :]) ** 2
    tie[:, columns:] = 0
    tie[:, :columns] += 2 * rows * rows * wish
    forbidden = int(tie.max(initial=0)) * rows + 1
    final = linear_sum_assignment(np.where(tight, tie, forbidden))[1]
    answer = [0] * columns
    for row, column in enumerate(final.tolist()):
        if column < columns:
            answer[column] = row
    return answer


def _tight(cost: Ints, taken: Ints) -> npt.NDArray[np.bool_]:
    """The pairs with no reduced cost under optimal prices: those of all cheapest assignments, and of no dearer one.

    Prices by Bellman and Ford's method over the columns: row r, at present on column taken[r], must not gain by moving.
    """
    own = cost[np.arange(len(cost)), taken]
    gain = np.empty_like(cost)
    gain[taken] = cost - own[:, None]
    price = np.zeros(len(cost), dtype=np.int64)
    for _ in range(len(cost)):
        lower = np.minimum(price, (price[:, None] + gain).min(axis=0))
        if np.array_equal(lower, price):
            break
        price = lower
    reduced = cost - own[:, None] + price[taken][:, None] - price[None, :]
    tight: npt.NDArray[np.bool_] = reduced == 0
    return tight
