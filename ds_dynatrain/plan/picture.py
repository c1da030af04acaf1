"""The whole picture of a plan: bytes by member and by node, and the memory of every member.

It is computed for all ranks at once. State kinds that are sharded alike are counted once. If ZeRO divides a kind, the
runs of all ranks are one set of rows. If the ranks of a shard group hold a kind whole, ranks whose members come from
the same places form a *class*: they lack the same runs, except those that each of them has in a part of its own (of
another stage, or of the masters from which it casts), and these are taken off rank by rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_dynatrain.plan.plan import SwitchPlan
from ds_dynatrain.plan.sides import NO_ROWS, RELAYED_PARTS, TURNS, Sides, width_of_shares
from ds_dynatrain.space import ABSENT, Kind, Layout, Sharding, VirtualParameterSpace, interval
from ds_dynatrain.space.interval import Ints, Runs, join
from ds_dynatrain.space.sharding import Owned

Floats = npt.NDArray[np.float64]
Rows = tuple[Ints, Ints, Ints]
"""Runs of coordinates as arrays: (class or rank, start, stop)."""
ROWS_AT_ONCE = 1 << 20
"""How many runs are collected before they are counted."""


@dataclass(frozen=True, eq=False)
class Picture:
    """The bytes of a plan. Arrays have an entry for each of `members`, in ascending order.

    kept: bytes that the member already holds; it copies them, or leaves them in place.
    cast: bytes that the member casts from its new masters.
    sent, received: bytes that it exchanges with other members: row 0 inside its node, row 1 between nodes.
    by_node: bytes from each node (row) to each node (column), without what members keep.
    """

    members: Ints
    kept: Ints
    cast: Ints
    sent: Ints
    received: Ints
    by_node: Floats

    @property
    def gives(self) -> Ints:
        """Bytes that each member sends."""
        total: Ints = self.sent.sum(0)
        return total

    @property
    def takes(self) -> Ints:
        """Bytes that each member receives."""
        total: Ints = self.received.sum(0)
        return total


def picture_of(plan: SwitchPlan, nodes: Ints | None = None) -> Picture:
    """Return the bytes of a whole plan, by member and by node.

    nodes: the number of the node of each of `plan.members`; None for one node.
    """
    sides, members = plan.sides, np.array(plan.members, dtype=np.int64)
    places = np.zeros_like(members) if nodes is None else nodes
    count = _Count(sides, members, places)
    for kinds in sides.alike():
        count.add_kind(kinds[0], sum(kind.itemsize for kind in kinds))
    kept, cast, sent, received = map(_whole, (count.kept, count.cast, count.sent, count.received))
    return Picture(members, kept, cast, sent, received, count.by_node)


def memory_of(plan: SwitchPlan, found: Picture, budget_bytes: int) -> Ints:
    """Return the memory of each of the plan's members, as rows: its state before, its state after, its bytes in flight.

    found: the bytes of the plan.
    budget_bytes: the maximum number of bytes in flight per member.
    """
    sides, rows = plan.sides, np.zeros((3, len(found.members)), np.int64)
    rows[0, np.searchsorted(found.members, sides.vps.members)] = held_bytes(sides.space, sides.vps.layout, plan.kinds)
    rows[1, np.searchsorted(found.members, sides.members)] = held_bytes(sides.space, sides.layout, plan.kinds_after)
    rows[2] = np.minimum(budget_bytes, found.gives + found.takes)
    return rows


def held_bytes(vps: VirtualParameterSpace, layout: Layout, kinds: Collection[str], rank: int | None = None) -> Ints:
    """Return the bytes of the given state kinds on each rank of a layout, or on one rank, without padding.

    A weight and its master are counted once if they share a buffer (stages 0 and 3 in fp32).
    """
    total = np.zeros(layout.world_size if rank is None else 1, np.int64)
    for name in kinds:
        kind = vps.kind(name)
        total += _numel(vps, layout, name, rank) * kind.itemsize
        if kind.derived_from in kind.sources and kind.derived_from in kinds and layout.zero_stage in (0, 3):
            total -= _numel(vps, layout, str(kind.derived_from), rank) * kind.itemsize
    return total


def _numel(vps: VirtualParameterSpace, layout: Layout, kind: str, rank: int | None) -> Ints | int:
    """Return the number of elements of a state kind on each rank, or on one rank if it is given."""
    cut = vps.sharding(layout, kind)
    if rank is not None:
        return cut.holding(rank).numel
    total = np.zeros(layout.world_size, np.int64)
    for part in _classes(cut, vps.bases, np.zeros_like(total)):
        total[part.ranks] += _whole(part.each(part.rows, (part.rows[0][:0],) * 3))
    return total


def _whole(sums: Floats) -> Ints:
    return np.rint(sums).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Classes:
    """Some ranks, in classes, and runs that all ranks of a class hold or lack.

    ranks: ranks, each in one class.
    number: the class of each of `ranks`.
    rows: (class, start, stop) of each run.
    """

    ranks: Ints
    number: Ints
    rows: Rows

    @cached_property
    def first(self) -> Ints:
        """One rank of each class."""
        found = np.zeros(int(self.number.max(initial=-1)) + 1, np.int64)
        found[self.number] = self.ranks
        return found

    @property
    def is_single(self) -> bool:
        """Whether every class contains a single rank."""
        return len(self.first) == len(self.ranks)

    def each(self, rows: Rows, apart: Rows) -> Floats:
        """Return the number of elements in the rows of each rank's class, without those in its own rows of `apart`."""
        of_class = np.bincount(rows[0], rows[2] - rows[1], len(self.first))[self.number]
        own = np.bincount(apart[0], apart[2] - apart[1], int(self.ranks.max()) + 1)[self.ranks]
        return np.subtract(of_class, own, dtype=np.float64)

    def own(self, rows: Rows, held: Owned, heir: Ints) -> Rows:
        """Return (rank, start, stop) of those parts of its class's rows that a rank holds.

        held: parts of rows, as (row, start, stop, holder).
        heir: the rank of each holder, or ABSENT.
        """
        row, start, stop, holder = held
        number = np.full(int(self.ranks.max()) + 1, ABSENT, np.int64)
        number[self.ranks] = self.number
        rank = heir[holder]
        rank = np.where(rank < len(number), rank, ABSENT)
        mine = (rank != ABSENT) & (number[rank] == rows[0][row])
        return rank[mine], start[mine], stop[mine]


def _classes(cut: Sharding, bases: Ints, origin: Ints) -> Iterator[_Classes]:
    """Yield what all ranks of a sharding hold, some coordinates at a time.

    If ZeRO divides the kind, each rank is a class. If the ranks of shard groups hold it whole, a class has those ranks
    of one group that have the same `origin`.

    bases: the first coordinate of each tensor, and the end of the line.
    """
    if cut.shared is None:
        every, (start, stop) = np.arange(cut.ranks, dtype=np.int64), cut.region()
        step = max(1, ROWS_AT_ONCE // cut.ranks)
        for low in range(0, len(bases) - 1, step):
            window = bases[[low, min(low + step, len(bases) - 1)]]
            _, _, first, last = interval.intersect(start, stop, window[:1], window[1:])
            _, first, last, rank = cut.holders(first, last)
            yield _Classes(every, every, (rank, first, last))
        return
    for ranks, start, stop in cut.shared:
        origins, number = np.unique(origin[ranks], return_inverse=True)
        count = len(origins)
        rows = np.repeat(np.arange(count, dtype=np.int64), len(start)), np.tile(start, count), np.tile(stop, count)
        yield _Classes(ranks, number, rows)


def _without(cut: Sharding, rows: Rows, holder: Ints) -> Rows:
    """Remove from the rows of each class the elements that the class's `holder` holds."""
    row, start, stop = cut.lacking(rows[1], rows[2], holder[rows[0]])
    return rows[0][row], start, stop


class _Count:
    """Sums of bytes, filled kind by kind. Arrays have an entry for each member; see `Picture`."""

    def __init__(self, sides: Sides, members: Ints, nodes: Ints) -> None:
        """Begin with no bytes."""
        self._sides, self._node, self._nodes = sides, nodes, int(nodes.max(initial=0)) + 1
        self._sender, self._receiver = (np.searchsorted(members, each) for each in (sides.vps.members, sides.members))
        self.kept, self.cast = np.zeros(len(members)), np.zeros(len(members))
        self.sent, self.received = np.zeros((2, len(members))), np.zeros((2, len(members)))
        self.by_node = np.zeros((self._nodes, self._nodes))
        known = np.flatnonzero(sides.source_ranks != ABSENT)
        self._origin = np.full(len(sides.members), ABSENT, np.int64)
        self._origin[known] = _places(sides.vps)[sides.source_ranks[known]]
        self._heir = np.full(sides.vps.layout.world_size, ABSENT, np.int64)
        self._heir[sides.source_ranks[known]] = known

    def add_kind(self, kind: Kind, nbytes: int) -> None:
        """Add the bytes of all ranks for the kinds that are sharded like `kind`, `nbytes` for each element."""
        sides, every = self._sides, np.arange(len(self._receiver), dtype=np.int64)
        steps = [(self.kept, sides.source(name), sides.source_ranks, self._heir) for name in kind.sources]
        if kind.derived_from is not None:
            steps.append((self.cast, sides.target(kind.derived_from), every, every))
        read, has_relays = sides.source(sides.read_from(kind)), sides.has_relays(kind)
        lacking = [NO_ROWS]
        for part in _classes(sides.target(kind.name), sides.vps.bases, self._origin):
            rows, apart = part.rows, (part.rows[0][:0],) * 3
            earlier: list[tuple[Sharding, Ints]] = []
            for total, cut, holder, heir in steps:
                before = part.each(rows, apart)
                if part.is_single or cut.shared is not None:
                    rows, apart = _without(cut, rows, holder[part.first]), _without(cut, apart, holder)
                else:
                    more = part.own(rows, cut.holders(rows[1], rows[2]), heir)
                    for other, its_holder in earlier:
                        more = _without(other, more, its_holder)
                    apart = join([apart, more])
                    earlier.append((cut, holder))
                total[self._receiver[part.ranks]] += (before - part.each(rows, apart)) * nbytes
            if has_relays:
                _, low, high, _ = read.owners(*rows[1:])
                self._check_held(part, kind, rows, int((high - low).sum()))
                lacking.append(rows)
            elif read.has_copies:
                self._add_copies(part, rows, apart, read, kind, nbytes)
            else:
                self._add_class(part, rows, read, kind, nbytes)
                self._add_direct(read, apart, -nbytes)
        if has_relays:
            self._add_relayed(kind, read, interval.union(*join(lacking)[1:]), nbytes)

    def _add_relayed(self, kind: Kind, read: Sharding, lacking: Runs, nbytes: int) -> None:
        """Add what ranks receive of a kind with relays, some nodes at a time.

        lacking: the runs that some rank receives.
        """
        sides, runs = self._sides, len(lacking.start)
        firsts = np.unique(sides.target_nodes, return_index=True)[1] if runs else interval.ints([])
        step = max(1, ROWS_AT_ONCE // (8 * (runs + RELAYED_PARTS + TURNS * read.ranks)))
        for ranks in np.split(firsts, range(step, len(firsts), step)):
            every = np.tile(lacking.start, len(ranks)), np.tile(lacking.stop, len(ranks)), np.repeat(ranks, runs)
            _, start, stop, relay, taker = sides.relays(kind, *every)
            found = [(*NO_ROWS, NO_ROWS[0] > 0)]
            if read.has_copies:
                for each in read.copies(*interval.union(start, stop)):
                    row, _, low, high = interval.intersect(start, stop, each.start, each.stop)
                    found.append(
                        (row, low, high, np.isin(sides.target_nodes[taker[row]], sides.source_nodes[each.ranks]))
                    )
            else:
                row, low, high, sender = read.owners(start, stop)
                found.append((row, low, high, sides.target_nodes[taker[row]] == sides.source_nodes[sender]))
            row, low, high, is_near = map(np.concatenate, zip(*found, strict=True))
            giver, rank, size = relay[row], taker[row], (high - low) * nbytes
            is_direct = is_near | (giver == rank)
            self._add_direct(read, (rank[is_direct], low[is_direct], high[is_direct]), nbytes)
            self._add_pairs(self._receiver[giver[~is_direct]], self._receiver[rank[~is_direct]], size[~is_direct])

    def _add_class(self, part: _Classes, rows: Rows, read: Sharding, kind: Kind, nbytes: int) -> None:
        """Add what every rank of each class receives."""
        row, start, stop, sender = read.owners(*rows[1:])
        self._check_held(part, kind, rows, int((stop - start).sum()))
        number, size = rows[0][row], (stop - start) * nbytes
        if part.is_single:
            return self._add(sender, part.first[number], size)
        giver, taker = self._sender[sender], self._receiver[part.ranks]
        shape = len(part.first), self._nodes
        given = np.bincount(number * self._nodes + self._node[giver], size, shape[0] * shape[1]).reshape(shape)
        takers = np.bincount(part.number * self._nodes + self._node[taker], minlength=shape[0] * shape[1]).reshape(
            shape
        )
        self.by_node += given.T @ takers.astype(np.float64)
        inside, outside = takers[number, self._node[giver]], takers.sum(1)[number]
        self.sent[0] += np.bincount(giver, size * inside, len(self._node))
        self.sent[1] += np.bincount(giver, size * (outside - inside), len(self._node))
        near, every = given[part.number, self._node[taker]], given.sum(1)[part.number]
        self.received[0, taker] += near
        self.received[1, taker] += every - near
        return None

    def _add(self, sender: Ints, receiver: Ints, size: Ints) -> None:
        """Add bytes from source ranks to target ranks."""
        self._add_pairs(self._sender[sender], self._receiver[receiver], size)

    def _add_pairs(self, giver: Ints, taker: Ints, size: Ints) -> None:
        """Add bytes from members to members, given by their places."""
        out_of, into = self._node[giver], self._node[taker]
        is_apart, count = (out_of != into) * len(self._node), len(self._node)
        self.sent += np.bincount(is_apart + giver, size, 2 * count).reshape(2, -1)
        self.received += np.bincount(is_apart + taker, size, 2 * count).reshape(2, -1)
        np.add.at(self.by_node.reshape(-1), out_of * self._nodes + into, size)  # few pairs, and many pairs of nodes

    def _add_copies(self, part: _Classes, rows: Rows, apart: Rows, read: Sharding, kind: Kind, nbytes: int) -> None:
        """Add what every rank receives of what all ranks of a shard group hold, which these send in turn."""
        held = sum(int((each.stop - each.start).sum()) for each in read.copies(*interval.union(*rows[1:])))
        self._check_held(part, kind, (rows[0], *interval.union(*rows[1:])), held)
        self._add_direct(read, apart, -nbytes)  # turns go by coordinates, so the sums of class and rank add up
        if part.is_single:
            return self._add_direct(read, (part.first[rows[0]], *rows[1:]), nbytes)
        found = [(interval.ints([]),) * 3]
        for number in range(len(part.first)):
            mine = rows[0] == number
            takers, (start, stop) = part.ranks[part.number == number], interval.union(rows[1][mine], rows[2][mine])
            for each in read.copies(start, stop):
                _, low, high, share = interval.cut_every(each.start, each.stop, width_of_shares(each, len(each.start)))
                for rank in takers.tolist():
                    able = self._sides.able(each, rank)
                    size = np.bincount(share % len(able), (high - low) * nbytes, len(able)).astype(np.int64)
                    found.append((able, np.full_like(able, rank), size))
                    if len(found) * len(able) > ROWS_AT_ONCE:
                        self._add(*join(found))
                        found = found[:1]
        self._add(*join(found))

    def _check_held(self, part: _Classes, kind: Kind, rows: Rows, held: int) -> None:
        """Raise SwitchRefused if a rank lacks elements that no source rank holds.

        held: number of elements of the rows that source ranks hold.
        """
        for rank in part.ranks.tolist() if held < int((rows[2] - rows[1]).sum()) else ():
            needs = self._sides.needs(kind, rank, int(self._sides.source_ranks[rank]))
            self._sides.senders(kind, rank, needs.remote)

    def _add_direct(self, read: Sharding, rows: Rows, nbytes: int) -> None:
        """Add what ranks receive from source ranks, `nbytes` for each element of the rows (rank, start, stop)."""
        if not read.has_copies:
            row, start, stop, sender = read.owners(*rows[1:])
            self._add(sender, rows[0][row], (stop - start) * nbytes)
            return
        for each in read.copies(*interval.union(*rows[1:])):
            row, _, low, high = interval.intersect(*rows[1:], each.start, each.stop)
            part, start, stop, sender = self._sides.shares(each._replace(start=low, stop=high), rows[0][row])
            self._add(sender, rows[0][row][part], (stop - start) * nbytes)


def _places(vps: VirtualParameterSpace) -> Ints:
    """Return a number for each current rank, equal for ranks at one place of the pipe, expert and tensor axes."""
    mesh, ranks = vps.mesh(vps.layout), range(vps.layout.world_size)
    if mesh is None:
        return np.zeros(len(ranks), np.int64)
    numbers: Ints = np.unique([mesh.place(rank) for rank in ranks], axis=0, return_inverse=True)[1].reshape(-1)
    return numbers
