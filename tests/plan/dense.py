"""Bytes that members receive in slots, as a dense table, and the fewest by the Hungarian method."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import numpy as np
from scipy.optimize import linear_sum_assignment

from ds_dynatrain.plan import plan_switch
from ds_dynatrain.plan.kept_bytes import KeptBytes, kept_bytes
from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import ABSENT, Kind, Layout, Sharding, VirtualParameterSpace, interval, row_of
from ds_dynatrain.space.interval import Ints


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


def fewest_bytes(cost: Ints, rank_zero_stays: bool) -> int:
    """Return the fewest bytes of any assignment of rows (members) to all columns (slots)."""
    if rank_zero_stays:
        return int(cost[0, 0]) + fewest_bytes(cost[1:, 1:], rank_zero_stays=False)
    rows, columns = linear_sum_assignment(cost)
    return int(cost[rows, columns].sum())


def table_of(kept: KeptBytes) -> Ints:
    """The whole table of bytes kept, with a row for each source rank."""
    table: Ints = kept.by_class.toarray()[kept.ranks.of][:, kept.slots.of]
    table[kept.rank, kept.slot] = kept.nbytes
    return table


def received(
    vps: VirtualParameterSpace, target_layout: Layout, candidates: Iterable[int], kinds: Iterable[str] | None = None
) -> Ints:
    """Return the same table as `slot_costs`, from the sparse one."""
    sides = plan_switch(vps, target_layout, range(target_layout.world_size), kinds).sides
    kept = kept_bytes(sides)
    table = np.vstack([kept.wanted - table_of(kept), kept.wanted])
    return table[[sides.source_rank.get(member, ABSENT) for member in candidates]]
