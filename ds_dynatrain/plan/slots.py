"""Slots: which member takes which rank of the new world, so that the fewest bytes move.

The member at rank 0 keeps it if it stays. All others are assigned by the Hungarian method (scipy's
`linear_sum_assignment`) on the bytes that a member would receive in a slot. Several assignments may be cheapest: a
second run over only the pairs that occur in a cheapest assignment chooses one of them, the same on every member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.plan import plan_switch
from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import (
    ABSENT,
    Kind,
    Layout,
    Sharding,
    VirtualParameterSpace,
    interval,
    row_of,
)
from ds_dynatrain.space.interval import Ints


def assign_slots(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    candidates: Iterable[int],
    node_of: Mapping[int, str] | None = None,
    kinds: Iterable[str] | None = None,
) -> tuple[int, ...]:
    """Return the members of the target in rank order.

    candidates: members that may hold a slot; in a fixed set all processes, idle ones too. node_of: the node of each
    candidate. At equal bytes, prefer members that work already, then nodes that hold more of these, then lower numbers;
    lower ranks get lower slots. Raise LayoutError if there are fewer candidates than slots.
    """
    node_of, members = node_of or {}, set(candidates)
    working = [member for member in vps.members if member in members]
    busy = Counter(node_of.get(member, "") for member in working)
    idle = members.difference(working)
    order = working + sorted(idle, key=lambda each: (-busy[node_of.get(each, "")], node_of.get(each, ""), each))
    slots = target_layout.world_size
    if len(order) < slots:
        raise LayoutError(
            f"{target_layout} has {slots} ranks and only {len(order)} members may take one: {sorted(order)}; "
            f"choose a layout of at most {len(order)} ranks"
        )
    cost = slot_costs(vps, target_layout, order, kinds)
    rows = np.append(0, 1 + _cheapest(cost[1:, 1:])) if order[0] == vps.members[0] else _cheapest(cost)
    return tuple(np.array(order)[rows].tolist())


def slot_costs(
    vps: VirtualParameterSpace, target_layout: Layout, candidates: Iterable[int], kinds: Iterable[str] | None = None
) -> Ints:
    """Return the bytes that each candidate (row) would receive in each slot (column)."""
    slots = target_layout.world_size
    sides = plan_switch(vps, target_layout, range(slots), kinds).sides
    by_rank = np.zeros((vps.layout.world_size + 1, slots), dtype=np.int64)
    alike: dict[object, tuple[Kind, int]] = {}
    for kind in sides.kinds:
        row = row_of(kind.name)  # kinds with one key lie alike under every layout, such as a master and its moments
        own = kind.groups, kind.whole_tensors, kind.sources[1:], kind.derived_from
        key = (row.stages, row.whole_in, row.of_frozen, *own)
        first, nbytes = alike.get(key, (kind, 0))
        alike[key] = first, nbytes + kind.itemsize
    for kind, nbytes in alike.values():
        by_rank += _missing_in_slots(sides, kind) * nbytes
    return by_rank[[sides.source_rank.get(member, ABSENT) for member in candidates]]


def _missing_in_slots(sides: Sides, kind: Kind) -> Ints:
    """Return the elements of a kind that each slot (column) lacks, in the rows of `_missing`."""
    slots, shared = sides.layout.world_size, sides.target(kind.name).shared
    result = np.zeros((sides.vps.layout.world_size + 1, slots), dtype=np.int64)
    for ranks, start, stop in shared or ():  # many slots share most of it; a slot does not lack what it can cast
        result[:, ranks] += _missing(sides, kind, start, stop)[:, None]
    for slot in range(slots):
        if shared is None:
            want = sides.needs(kind, slot, ABSENT).remote
            result[:, slot] = _missing(sides, kind, want.start, want.stop)
        elif kind.derived_from is not None:
            held = sides.target(kind.derived_from).holding(slot)
            result[:, slot] -= _missing(sides, kind, held.start, held.stop)
    return result


def _missing(sides: Sides, kind: Kind, start: Ints, stop: Ints) -> Ints:
    """Count the elements of tidy runs that a member lacks, for each source rank and last for one without a rank."""
    ranks = sides.vps.layout.world_size
    result = np.full(ranks + 1, int((stop - start).sum()), dtype=np.int64)
    earlier: list[Sharding] = []
    for cut in sorted(map(sides.source, kind.sources), key=lambda each: not each.replicated):
        if cut.replicated:
            _, start, stop = interval.subtract(start, stop, *cut.region())
            result[:ranks] = int((stop - start).sum())
        elif cut.shared is not None and not earlier:
            for some, first, last in cut.shared:
                _, _, low, high = interval.intersect(start, stop, first, last)
                result[some] -= int((high - low).sum())
            earlier.append(cut)
        else:
            _, low, high, rank = cut.holders(start, stop)
            for before in earlier:  # elements that a rank holds twice count once
                row, low, high = before.lacking(low, high, rank)
                rank = rank[row]
            np.subtract.at(result, rank, high - low)
            earlier.append(cut)
    return result


def _cheapest(cost: Ints) -> Ints:
    """Return the row assigned to each column: least cost, and among equals the earliest rows in their order."""
    rows, columns = cost.shape
    square = np.zeros((rows, rows), dtype=np.int64)
    square[:, :columns] = cost
    tight = _tight(square, linear_sum_assignment(square)[1])
    place = np.arange(rows, dtype=np.int64)[:, None]
    tie = (place - place.T) ** 2
    tie[:, columns:] = 0
    tie[:, :columns] += 2 * rows * rows * place
    forbidden = int(tie.max(initial=0)) * rows + 1
    column_of = linear_sum_assignment(np.where(tight, tie, forbidden))[1]
    row_of_column: Ints = np.argsort(column_of)[:columns]
    return row_of_column


def _tight(cost: Ints, taken: Ints) -> npt.NDArray[np.bool_]:
    """Return the pairs with no reduced cost under optimal prices: exactly those of all cheapest assignments.

    The prices come from Bellman and Ford's method over the columns: row r, at present in column taken[r], must not gain
    by moving.
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
