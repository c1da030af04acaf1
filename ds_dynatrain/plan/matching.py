"""The assignment of source ranks to slots (ranks of the target) that keeps the most bytes, with prices that prove it.

This is a transport problem: a linear program whose vertices are integral. In a slot, a rank either keeps more than its
class does, which makes the two a listed pair, or as much as its class, whose ranks are interchangeable in all slots of
a class. The dual prices of ranks and slots prove that no assignment keeps more (`most_kept`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, vstack

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.kept_bytes import Bools, Classes, KeptBytes
from ds_dynatrain.space import ABSENT
from ds_dynatrain.space.interval import Ints, join

Selection = tuple[bool | Bools, ...]


@dataclass(frozen=True, eq=False)
class Prices:
    """Dual prices, in bytes, of source ranks and slots.

    The bytes that a rank keeps in a slot never exceed the sum of their two prices. The sum of all prices is therefore
    an upper bound for every assignment.
    """

    rank: Ints
    slot: Ints


@dataclass(frozen=True, eq=False)
class Matching:
    """The source rank at each slot, or ABSENT, and the prices that bound what any assignment keeps."""

    rank_of: Ints
    prices: Prices


def most_kept(kept: KeptBytes, prices: Prices, ranks: Bools, slots: Bools) -> int:
    """Return an upper bound, proved by the prices, on the bytes that any assignment of these ranks and slots keeps.

    Raises LayoutError if a price is negative, or if a rank keeps more in a slot than the sum of their prices.
    """
    by_rank, by_slot = prices.rank[ranks], prices.slot[slots]
    pairs = ranks[kept.rank] & slots[kept.slot]
    table = coo_array(kept.by_class)
    cheapest = [np.full(size, np.iinfo(np.int64).max // 2) for size in table.shape]
    np.minimum.at(cheapest[0], kept.ranks.of[ranks], by_rank)
    np.minimum.at(cheapest[1], kept.slots.of[slots], by_slot)
    short = [
        -by_rank,
        -by_slot,
        (kept.nbytes - prices.rank[kept.rank] - prices.slot[kept.slot])[pairs],
        table.data - cheapest[0][table.row] - cheapest[1][table.col],
    ]
    if (worst := np.concatenate(short).max(initial=0)) > 0:
        raise LayoutError(f"prices are {worst} bytes too low to prove a bound; take the prices that `match` returns")
    return int(by_rank.sum() + by_slot.sum())


def match(kept: KeptBytes, ranks: Bools, slots: Bools) -> Matching:
    """Assign source ranks to slots of their zones such that they keep the most bytes. Zones are filled as far as
    possible.

    ranks, slots: masks of the ranks and slots that take part.

    Among the assignments that keep the most bytes, the result is the one in which lower ranks take part, and in which
    ranks get slots near their own position: it minimizes the sum of the squared distances, where positions count the
    ranks and slots that take part. Interchangeable ranks of a class get slots in ascending order. If the numbers are
    too large for an exact solution, all ranks get slots in ascending order, but the prices are still valid.
    """
    program = _Program.of(kept, ranks, slots)
    price = program.quick_prices()
    chosen = program.nearest(price)
    if chosen is None:
        price = program.prices()
        chosen = program.nearest(price)
    of_rank, _, of_slot, of_class, _ = program.by_sort(price)
    rank_of = program.in_order() if chosen is None else program.dealt(chosen)
    table, rank, slot = (
        coo_array(kept.by_class),
        np.maximum(of_rank, 0),
        np.maximum(of_slot + of_class[kept.slots.of], 0),
    )
    pairs = ranks[kept.rank]  # rounding may have made prices of slots too low
    np.maximum.at(slot, kept.slot[pairs], (kept.nbytes - rank[kept.rank])[pairs])
    cheapest, needed = np.full(table.shape[0], np.iinfo(np.int64).max // 2), np.zeros(table.shape[1], np.int64)
    np.minimum.at(cheapest, kept.ranks.of[ranks], rank[ranks])
    np.maximum.at(needed, table.col, table.data - cheapest[table.row])
    return Matching(rank_of, Prices(rank, np.maximum(slot, needed[kept.slots.of])))


@dataclass(frozen=True, eq=False)
class _Program:
    """The linear program of `match`. Ranks and slots that take part are called open.

    The base of a class of slots is the number of bytes that ranks of every class in the zone keep there at least.

    The variables count, in this order: listed pairs (`rank`, `slot`); pairs of classes (`rank_class`, `slot_class`)
    that keep more than the base; ranks that act as members of their class; for each class of ranks, those that keep
    only the base; for each class of slots, those in which only the base is kept.
    The constraints: each rank is used once; a class is used at most as often as its ranks act as its members; each slot
    is used once; a class of slots is used at most as often as it has open slots; in each zone, the base is kept in at
    most as many slots as there are ranks that keep it.

    value: the bytes kept, for each variable.
    limit: the upper limit of each constraint.
    """

    kept: KeptBytes
    open_ranks: Bools
    open_slots: Bools
    rank: Ints
    slot: Ints
    rank_class: Ints
    slot_class: Ints
    value: Ints
    limit: Ints

    @staticmethod
    def of(kept: KeptBytes, ranks: Bools, slots: Bools) -> _Program:
        of_rank, of_slot = _sizes(kept.ranks, ranks), _sizes(kept.slots, slots)
        pairs = ranks[kept.rank] & slots[kept.slot]
        rank, slot = kept.rank[pairs], kept.slot[pairs]
        table = coo_array(kept.by_class)
        row, column, nbytes = table.row.astype(np.int64), table.col.astype(np.int64), table.data
        both = of_rank[row] * of_slot[column] > 0
        row, column, nbytes = row[both], column[both], nbytes[both]
        rank_zone, slot_zone = kept.class_zones
        every = np.bincount(rank_zone[of_rank > 0], minlength=kept.zone_count)[slot_zone]
        least = np.full_like(of_slot, np.iinfo(np.int64).max)
        np.minimum.at(least, column, nbytes)
        least[(of_slot == 0) | (np.bincount(column, minlength=len(of_slot)) < np.maximum(every, 1))] = 0
        more = nbytes > least[column]
        row, column, nbytes = row[more], column[more], nbytes[more]
        unpaid, hubs = np.zeros(len(ranks) + len(of_rank), np.int64), np.zeros(kept.zone_count, np.int64)
        value = np.concatenate([kept.nbytes[pairs], nbytes, unpaid, least])
        limit = np.concatenate([ranks.astype(np.int64), np.zeros_like(of_rank), slots, of_slot, hubs])
        return _Program(kept, ranks, slots, rank, slot, row, column, value, limit)

    def by_sort(self, of_constraint: Ints) -> list[Ints]:
        """Split an array with one entry per constraint by sort: ranks, rank classes, slots, slot classes, zones."""
        kept = self.kept
        sizes = len(self.open_ranks), len(kept.ranks.first), len(self.open_slots), len(kept.slots.first)
        return np.split(of_constraint, np.cumsum(sizes))

    def by_use(self, of_variable: Ints) -> list[Ints]:
        """Split an array with one entry per variable into five, in the order that the class's docstring gives."""
        sizes = len(self.rank), len(self.rank_class), len(self.open_ranks), len(self.kept.ranks.first)
        return np.split(of_variable, np.cumsum(sizes))

    @cached_property
    def matrix(self) -> csr_array:
        """The coefficient of each variable (column) in each constraint (row)."""
        kept, count = self.kept, (len(self.limit), len(self.value))
        (rank_zone, slot_zone), (r, of_r, s, of_s, hub) = kept.class_zones, self.by_sort(np.arange(count[0]))
        pair, both, stand, few, fill = self.by_use(np.arange(count[1]))
        entries = [
            (r[self.rank], pair, 1),
            (s[self.slot], pair, 1),
            (of_s[kept.slots.of[self.slot]], pair, 1),
            (of_r[self.rank_class], both, 1),
            (of_s[self.slot_class], both, 1),
            (r, stand, 1),
            (of_r[kept.ranks.of], stand, -1),
            (of_r, few, 1),
            (hub[rank_zone], few, -1),
            (of_s, fill, 1),
            (hub[slot_zone], fill, 1),
        ]
        sign = np.repeat([sign for _, _, sign in entries], [len(each) for each, _, _ in entries])
        return coo_array((sign, join([each[:2] for each in entries])), shape=count).tocsr()

    def prices(self) -> Ints:
        """Return the dual price of each constraint, from the whole linear program."""
        hub = bool(self.by_use(self.value)[4].any())
        ranks, slots = np.full(len(self.kept.ranks.first), hub), np.full(len(self.kept.slots.first), hub)
        ranks[self.rank_class] = slots[self.slot_class] = True  # only the constraints of these classes matter
        return self._solved(
            self.value, self.limit, (True, True, ranks[self.kept.ranks.of], hub, hub), (True, ranks, True, slots, hub)
        )

    def quick_prices(self) -> Ints:
        """Return dual prices from two small programs: one for classes, and one for what listed pairs keep in addition.

        The prices always prove a bound, which is usually the best one.
        """
        limit = self.limit.copy()
        self.by_sort(limit)[1][:] = _sizes(self.kept.ranks, self.open_ranks)
        price = self._solved(self.value, limit, (False, True, False, True, True), (False, True, False, True, True))
        of_rank, of_class = self.by_sort(price)[:2]
        of_rank[:] = of_class[self.kept.ranks.of]
        beyond = self.value - self.matrix.T @ price
        some = self.by_use(beyond)[0] > 0
        return price + self._solved(
            beyond, self.limit, (some, False, False, False, False), (True, False, True, False, False)
        )

    def _solved(self, value: Ints, limit: Ints, uses: Selection, sorts: Selection) -> Ints:
        """Return the dual price of each constraint in the program reduced to the selected variables and constraints.

        value, limit: the value of each variable and the limit of each constraint.
        uses, sorts: which variables of each of the five kinds, and which constraints of each kind, are selected.
        """
        variables, constraints = np.ones(len(value), bool), np.ones(len(limit), bool)
        for part, chosen in zip(self.by_use(variables) + self.by_sort(constraints), (*uses, *sorts), strict=True):
            part[:] = chosen
        price = np.zeros(len(limit), np.int64)
        if variables.any():
            found = linprog(
                -value[variables],
                A_ub=self.matrix[constraints][:, variables],
                b_ub=limit[constraints],
                method="highs-ds",
                options={"simplex_dual_edge_weight_strategy": "devex"},
            )
            if found.success:
                price[constraints] = np.rint(-found.ineqlin.marginals)
        return price

    def nearest(self, price: Ints) -> Ints | None:
        """Return how often each variable is used in the solution that `match` prefers.

        Returns None if no solution is optimal at these prices.
        """
        place, position = np.cumsum(self.open_ranks) - 1, np.cumsum(self.open_slots) - 1
        step = 2 * len(place) ** 2 * place
        cost = np.zeros_like(self.value)
        self.by_use(cost)[0][:] = (place[self.rank] - position[self.slot]) ** 2 + step[self.rank]
        self.by_use(cost)[2][:] = step
        zone_of, zone_of_slot = self.kept.zones
        taken = np.minimum(
            *(
                np.bincount(each, minlength=self.kept.zone_count)
                for each in (zone_of[self.open_ranks], zone_of_slot[self.open_slots])
            )
        )
        pair, _, stand, _, _ = self.by_use(np.arange(len(self.value)))
        used = np.append(zone_of[self.rank], zone_of), np.append(pair, stand)
        members = coo_array((np.ones(len(used[0])), used), shape=(len(taken), len(self.value))).tocsr()
        tight, full = self.value == self.matrix.T @ price, price > 0
        if not tight.any():
            return None
        matrix = csr_array(self.matrix[:, tight])
        found = linprog(
            cost[tight],
            A_ub=matrix[~full],
            b_ub=self.limit[~full],
            A_eq=vstack([matrix[full], members[:, tight]]),
            b_eq=np.append(self.limit[full], taken),
            method="highs-ds",
        )
        if found.x is None:
            return None
        chosen = np.zeros_like(self.value)
        chosen[tight] = np.rint(found.x)
        return chosen

    def in_order(self) -> Ints:
        """Return the rank at each slot if the open ranks of each zone get its open slots in ascending order."""
        found, (zone_of, zone_of_slot) = np.full(len(self.open_slots), ABSENT), self.kept.zones
        for zone in np.unique(zone_of_slot[self.open_slots]).tolist():
            ranks = np.flatnonzero(self.open_ranks & (zone_of == zone))
            slots = np.flatnonzero(self.open_slots & (zone_of_slot == zone))
            found[slots[: len(ranks)]] = ranks[: len(slots)]
        return found

    def dealt(self, chosen: Ints) -> Ints:
        """Return the rank at each slot, given how often each variable is used."""
        pair, both, stand, _, fill = self.by_use(chosen)
        found = np.full(len(self.open_slots), ABSENT)
        found[self.slot[pair > 0]] = self.rank[pair > 0]
        waiting = _by_class(self.kept.ranks, stand > 0)
        free = _by_class(self.kept.slots, self.open_slots & (found == ABSENT))
        coming: list[list[int]] = [[] for _ in free]
        for row, column, count in zip(self.rank_class.tolist(), self.slot_class.tolist(), both.tolist(), strict=True):
            coming[column] += waiting[row][:count]
            del waiting[row][:count]
        rest: list[list[int]] = [[] for _ in range(self.kept.zone_count)]
        zone_of, zone_of_slot = self.kept.zones
        for rank in sorted(itertools.chain.from_iterable(waiting)):
            rest[zone_of[rank]].append(rank)
        for column, count in enumerate(fill.tolist()):
            some = rest[zone_of_slot[self.kept.slots.first[column]]]
            coming[column] += some[:count]
            del some[:count]
        for places, ranks in zip(free, coming, strict=True):
            found[places[: len(ranks)]] = sorted(ranks)
        for slot in np.flatnonzero(self.open_slots & (found == ABSENT)).tolist():
            if some := rest[zone_of_slot[slot]]:
                found[slot] = some.pop(0)
        return found


def _sizes(classes: Classes, among: Bools) -> Ints:
    """Return how many of the selected ranks each class has."""
    return np.bincount(classes.of[among], minlength=len(classes.first))


def _by_class(classes: Classes, among: Bools) -> list[list[int]]:
    """Return the selected ranks of each class, in ascending order."""
    found: list[list[int]] = [[] for _ in classes.first]
    for rank in np.flatnonzero(among).tolist():
        found[classes.of[rank]].append(rank)
    return found
