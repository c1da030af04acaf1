"""The bytes that each member would keep at each rank (slot) of the target, as a sparse table.

A member keeps the elements that it holds at the source and needs in the slot, except those that can be cast there from
other state. Most kinds are cut into small parts, and a part at the source overlaps few parts at the target. If a whole
shard group holds the same elements, the table has one entry for the group instead of one for each of its ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array, hstack

from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import ABSENT, Kind, Sharding, interval
from ds_dynatrain.space.interval import Ints, Runs, join

Bools = npt.NDArray[np.bool_]
Held = tuple[Ints, Ints, Ints]
"""Runs of coordinates and what holds each run, as arrays (start, stop, holder).

A holder is a rank, or a whole shard group: the world size plus the index of the group."""


@dataclass(frozen=True, eq=False)
class Classes:
    """A division of ranks into classes: ranks of a class belong to the same shard groups, and hold the same bytes with
    them.

    of: the class of each rank.
    first: the first rank of each class.
    """

    of: Ints
    first: Ints


@dataclass(frozen=True, eq=False)
class KeptBytes:
    """The bytes that each source rank keeps in each slot (rank of the target layout).

    ranks, slots: the classes of source ranks and of slots.
    by_class: the bytes that a rank of a class (row) keeps in a slot of a class (column), unless the pair is listed.
    rank, slot, nbytes: the list of pairs in which a rank keeps more than its class does, and all bytes that it keeps
        there.
    wanted: the bytes that a member without a source rank receives in each slot.
    zones: the zone (set of nodes) of each rank and of each slot. A rank can only get slots of its zone, and a class
        lies in one zone.
    """

    ranks: Classes
    slots: Classes
    by_class: csr_array
    rank: Ints
    slot: Ints
    nbytes: Ints
    wanted: Ints
    zones: tuple[Ints, Ints]

    @property
    def zone_count(self) -> int:
        return 1 + max(int(each.max(initial=0)) for each in self.zones)

    @property
    def class_zones(self) -> tuple[Ints, Ints]:
        """Two arrays: the zone (set of nodes) of each class of ranks, and of each class of slots."""
        return self.zones[0][self.ranks.first], self.zones[1][self.slots.first]

    def within(self, rank_zone: Ints, slot_zone: Ints) -> KeptBytes:
        """Return the part of the table in which rank and slot are in the same zone, given the zone of each rank and
        slot.
        """
        pairs = rank_zone[self.rank] == slot_zone[self.slot]
        ranks, slots = _divided(self.ranks, rank_zone), _divided(self.slots, slot_zone)
        here, there = rank_zone[ranks.first], slot_zone[slots.first]
        order = np.argsort(there, kind="stable")
        start, stop = (np.searchsorted(there[order], here, side=side) for side in ("left", "right"))
        row, nth = interval.expand(stop - start)
        column = order[start[row] + nth]
        nbytes = self.by_class[self.ranks.of[ranks.first[row]], self.slots.of[slots.first[column]]]
        by_class = coo_array((nbytes, (row, column)), shape=(len(here), len(there))).tocsr()
        by_class.eliminate_zeros()
        return KeptBytes(
            *(ranks, slots, by_class),
            *(self.rank[pairs], self.slot[pairs], self.nbytes[pairs]),
            *(self.wanted, (rank_zone, slot_zone)),
        )

    def by_node(self, node: Ints, slots: Bools) -> KeptBytes:
        """Return the table of what the nodes of members hold of each slot, in one zone, with a row for each member.

        node: the node of each member. The first members are the source ranks, and others may follow.
        slots: those of which bytes that single ranks hold are looked at.
        """
        _, first, node = np.unique(node, return_index=True, return_inverse=True)
        shape, classes = (len(first), len(self.slots.first)), len(self.ranks.first)
        key = np.unique(node[: len(self.ranks.of)] * classes + self.ranks.of)
        at, of = key // classes, key % classes
        rows = coo_array(self.by_class[of])
        key, place = np.unique(at[rows.row] * shape[1] + rows.col, return_inverse=True)
        most = np.zeros(len(key), np.int64)
        np.maximum.at(most, place, rows.data)
        by_class = coo_array((most, (key // shape[1], key % shape[1])), shape=shape).tocsr()
        mine = slots[self.slot]
        rank, slot, nbytes = self.rank[mine], self.slot[mine], self.nbytes[mine]
        nbytes = nbytes - self.by_class[self.ranks.of[rank], self.slots.of[slot]]
        key, place = np.unique(node[rank] * len(slots) + slot, return_inverse=True)
        at, slot = key // len(slots), key % len(slots)
        alone = np.bincount(place, nbytes, len(key)).astype(np.int64) + by_class[at, self.slots.of[slot]]
        order = np.argsort(node, kind="stable")
        start, stop = (np.searchsorted(node[order], at, side=side) for side in ("left", "right"))
        row, nth = interval.expand(stop - start)
        return KeptBytes(
            *(Classes(node, first), self.slots, by_class, order[start[row] + nth], slot[row], alone[row]),
            *(self.wanted, (np.zeros_like(node), np.zeros(len(slots), np.int64))),
        )

    def nbytes_of(self, rank_of: Ints) -> int:
        """Return the total bytes kept if `rank_of` gives the source rank at each slot. Entries may be ABSENT."""
        slot = np.flatnonzero(rank_of != ABSENT)
        rank, width = rank_of[slot], len(self.slots.of)
        nbytes = self.by_class[self.ranks.of[rank], self.slots.of[slot]]
        _, taken, listed = np.intersect1d(rank * width + slot, self.rank * width + self.slot, True, True)
        nbytes[taken] = self.nbytes[listed]
        return int(nbytes.sum())


def kept_bytes(sides: Sides) -> KeptBytes:
    """Return how many bytes each source rank keeps in each slot, over all kinds that move.

    The table does not depend on the members of `sides`.
    """
    ranks, slots = sides.vps.layout.world_size, sides.layout.world_size
    rank_groups = _groups(ranks, [sides.source(kind.name) for kind in sides.kinds])
    slot_groups = _groups(slots, [sides.target(kind.name) for kind in sides.kinds])
    shape = rank_groups.shape[1], slot_groups.shape[1]
    wanted = np.zeros(shape[1], np.int64)
    parts = [(np.empty(0, np.int64),) * 3]
    among, times = _tensors(sides)
    for kinds in sides.alike():
        kind, itemsize = kinds[0], sum(each.itemsize for each in kinds)
        for (start, stop, slot), sign in _wanted(sides, kind, among):
            factor = sign * itemsize * times[np.searchsorted(among.start, start, side="right") - 1]
            np.add.at(wanted, slot, factor * (stop - start))
            for row, rank, count in _meetings(sides, kind, start, stop):
                parts.append((rank, slot[row], factor[row] * count))
    rank, slot, nbytes = join(parts)
    table = coo_array((nbytes, (rank, slot)), shape=shape).tocsr()
    table.eliminate_zeros()
    table.sort_indices()  # sorted by row and column; each pair occurs once
    table = table.tocoo()
    rank, slot, nbytes = table.row.astype(np.int64), table.col.astype(np.int64), table.data
    single = (rank < ranks) & (slot < slots)
    shared = coo_array((nbytes[~single], (rank[~single], slot[~single])), shape=shape).tocsr()
    rank, slot, nbytes = rank[single], slot[single], nbytes[single]
    less = nbytes < 0
    rank_class = _classes(rank_groups[:, ranks:], shared[:ranks], rank[less])
    slot_class = _classes(slot_groups[:, slots:], shared[:, :slots].T, slot[less])
    by_class = rank_groups[rank_class.first] @ shared @ slot_groups[slot_class.first].T
    if less.any():  # each of these ranks and slots is a class of its own
        pairs = rank_class.of[rank[less]], slot_class.of[slot[less]]
        by_class = by_class + coo_array((nbytes[less], pairs), shape=by_class.shape)
    rank, slot, nbytes = rank[~less], slot[~less], nbytes[~less]
    by_class = csr_array(by_class)
    by_class.sort_indices()  # so that entries are found by binary search
    if len(rank):
        nbytes = nbytes + by_class[rank_class.of[rank], slot_class.of[slot]]
    zones = np.zeros(ranks, np.int64), np.zeros(slots, np.int64)
    return KeptBytes(rank_class, slot_class, by_class, rank, slot, nbytes, slot_groups @ wanted, zones)


def _tensors(sides: Sides) -> tuple[Runs, Ints]:
    """Return the coordinates of the tensors to look at, and for how many tensors each of them stands.

    If both sides cut each tensor by itself (stage 3), ranks share tensors of one shape and cut in the same way.
    """
    space, layouts = sides.space, (sides.vps.layout, sides.layout)
    if any(layout.zero_stage != 3 for layout in layouts):
        return Runs(space.bases[:1], space.bases[-1:]), np.ones(1, np.int64)
    meshes = [mesh for mesh in map(space.mesh, layouts) if mesh is not None]
    found: dict[Hashable, list[int]] = {}
    for number, tensor in enumerate(space.tensors):
        cuts = [(mesh.forms[number], mesh.partition[number].stages) for mesh in meshes]
        found.setdefault((tensor.shape, tensor.group, tensor.expert, *cuts), []).append(number)
    first = interval.ints([alike[0] for alike in found.values()])
    return Runs(space.bases[first], space.bases[first + 1]), interval.ints([*map(len, found.values())])


def _wanted(sides: Sides, kind: Kind, among: Runs) -> Iterator[tuple[Held, int]]:
    """Yield (runs that each slot needs, sign of their bytes in the sum).

    Runs that the slot can cast from its own state are also yielded, with a negative sign, so that they cancel.
    """
    goal = sides.target(kind.name)
    start, stop, slot = _held(goal, among)
    if kind.derived_from is not None and goal.shared is None:
        row, start, stop = sides.target(kind.derived_from).lacking(start, stop, slot)
        slot = slot[row]
    elif kind.derived_from is not None:
        yield _held(sides.target(kind.derived_from), among), -1
    yield (start, stop, slot), 1


def _held(cut: Sharding, among: Runs) -> Held:
    """Return the runs of a sharding with their holders. If a whole shard group holds a run, the holder is the group.

    among: the coordinates to look at.
    """
    if cut.shared is None:
        _, _, first, last = interval.intersect(*cut.region(), *among)
        _, start, stop, rank = cut.holders(first, last)
        return start, stop, rank
    holder = np.repeat(np.arange(len(cut.shared), dtype=np.int64), [len(start) for _, start, _ in cut.shared])
    _, start, stop = join(cut.shared)
    row, _, start, stop = interval.intersect(start, stop, *among)
    return start, stop, cut.ranks + holder[row]


def _meetings(sides: Sides, kind: Kind, start: Ints, stop: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield (row, source rank, number of elements) for the elements of slots' runs that a source rank holds.

    The rank may stand for a shard group, as in `Held`. If a rank holds the same bytes in two kinds, they count once.
    """
    earlier: list[Sharding] = []
    for cut in sorted(map(sides.source, kind.sources), key=lambda cut: cut.shared is None):
        if cut.shared is None:
            row, low, high, rank = cut.holders(start, stop)
            for before in earlier:
                part, low, high = before.lacking(low, high, rank)
                row, rank = row[part], rank[part]
            yield row, rank, high - low
        for number, (_, first, last) in enumerate(cut.shared or ()):
            for before in earlier:  # the same groups share these runs
                _, first, last = interval.subtract(first, last, *(before.shared or [])[number][1:])
            row, _, low, high = interval.intersect(start, stop, first, last)
            yield row, np.full_like(row, cut.ranks + number), high - low
        earlier.append(cut)


def _groups(ranks: int, cuts: Iterable[Sharding]) -> csr_array:
    """Return a 0/1 matrix that maps each rank (row) to its holders (columns): itself and its shard groups."""
    shared = next((cut.shared for cut in cuts if cut.shared is not None), [])
    own = np.arange(ranks, dtype=np.int64)
    rank = np.concatenate([own, *(members for members, _, _ in shared)])
    sizes = [len(members) for members, _, _ in shared]
    holder = np.append(own, ranks + np.repeat(np.arange(len(shared), dtype=np.int64), sizes))
    return coo_array((np.ones(len(rank), np.int64), (rank, holder)), shape=(ranks, ranks + len(shared))).tocsr()


def _classes(groups: csr_array, shares: csr_array, alone: Ints) -> Classes:
    """Divide ranks into classes: ranks of a class belong to the same groups and have equal rows in `shares`.

    alone: ranks that are classes of their own.
    """
    own = np.zeros(groups.shape[0], np.int64)
    own[alone] = 1 + np.arange(len(alone))
    rows = csr_array(hstack([groups, shares, own[:, None]], format="csr"))
    rows.eliminate_zeros()
    rows.sort_indices()
    known: dict[tuple[bytes, bytes], int] = {}
    of = np.empty(len(own), np.int64)
    for rank, (start, stop) in enumerate(itertools.pairwise(rows.indptr.tolist())):
        key = rows.indices[start:stop].tobytes(), rows.data[start:stop].tobytes()
        of[rank] = known.setdefault(key, len(known))
    return Classes(of, np.unique(of, return_index=True)[1])


def _divided(classes: Classes, zone: Ints) -> Classes:
    """Divide classes further, so that each lies in one zone."""
    key = classes.of * (1 + int(zone.max(initial=0))) + zone
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    return Classes(of, first)
