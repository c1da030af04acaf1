"""Slots: the assignment of members to the ranks (slots) of the new world that moves the fewest bytes.

If the member at rank 0 stays, it keeps rank 0. All others are assigned by the Hungarian method (scipy's
`linear_sum_assignment`), where the cost is the number of bytes that a member would receive in a slot. If several
assignments are cheapest, a second run over the pairs that occur in any of them chooses the same one on every member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

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
    """Return the member for each rank (slot) of the target.

    candidates: the members that may take a slot, working or idle.
    node_of: the node of each candidate.
    kinds: the state kinds that move; None for all that the source holds.

    Ties in bytes moved are broken by: already working; node with more working members; lower member number. Members
    with lower current ranks get lower slots. Raises LayoutError if there are fewer candidates than slots.
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
    """Return the number of bytes that each candidate (row) would receive in each slot (column)."""
    slots = target_layout.world_size
    sides = plan_switch(vps, target_layout, range(slots), kinds).sides
    by_rank = np.zeros((vps.layout.world_size + 1, slots), dtype=np.int64)
    alike: dict[object, tuple[Kind, int]] = {}
    for kind in sides.kinds:
        # kinds with the same key are sharded alike under every layout, such as a master and its moments
        row = row_of(kind.name)
        own = kind.groups, kind.whole_tensors, kind.sources[1:], kind.derived_from
        key = (row.stages, row.whole_in, row.of_frozen, *own)
        first, nbytes = alike.get(key, (kind, 0))
        alike[key] = first, nbytes + kind.itemsize
    for kind, nbytes in alike.values():
        by_rank += _missing_in_slots(sides, kind) * nbytes
    return by_rank[[sides.source_rank.get(member, ABSENT) for member in candidates]]


def _missing_in_slots(sides: Sides, kind: Kind) -> Ints:
    """Return how many elements of a kind each source rank (row) would lack in each slot (column).

    The last row is for a member without a source rank.
    """
    slots, shared = sides.layout.world_size, sides.target(kind.name).shared
    result = np.zeros((sides.vps.layout.world_size + 1, slots), dtype=np.int64)
    # elements that many slots share are counted once; elements that can be cast are subtracted below
    for ranks, start, stop in shared or ():
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
    """Count the elements that each source rank lacks, among runs that are sorted and do not overlap.

    The last entry of the result is for a member without a source rank.
    """
    ranks = sides.vps.layout.world_size
    result = np.full(ranks + 1, int((stop - start).sum()), dtype=np.int64)
    earlier: list[Sharding] = []
    for cut in sorted(map(sides.source, kind.sources), key=attrgetter("replicated"), reverse=True):
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
            for before in earlier:  # count elements that a rank holds twice only once
                row, low, high = before.lacking(low, high, rank)
                rank = rank[row]
            np.subtract.at(result, rank, high - low)
            earlier.append(cut)
    return result


def _cheapest(cost: Ints) -> Ints:
    """Return the row assigned to each column at the least total cost; ties prefer earlier rows, in their order."""
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
    """Return which (row, column) pairs occur in a cheapest assignment: those with zero reduced cost at optimal prices.

    taken: the column of each row in one cheapest assignment. The prices of columns come from the Bellman-Ford
    algorithm: they are such that no row gains by leaving its column.
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
