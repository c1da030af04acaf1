"""The bytes that a whole plan moves, by member and by node, and the memory that every member needs.

They are computed for many ranks at once, with a limited number of runs at a time. State kinds with the same sharding
are counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_dynatrain.plan.plan import SwitchPlan
from ds_dynatrain.plan.sides import NO_ROWS, RELAYED_PARTS, TURNS, Sides
from ds_dynatrain.space import ABSENT, Kind, Layout, Sharding, VirtualParameterSpace, interval
from ds_dynatrain.space.interval import Ints, Runs, join

Floats = npt.NDArray[np.float64]
Rows = tuple[Ints, Ints, Ints]
"""Runs of coordinates as arrays: (rank, start, stop)."""
ROWS_AT_ONCE = 1 << 20
"""Number of runs that are collected before their bytes are counted."""


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

    nodes: the number of the node of each of `plan.members`; None if all are on one node.
    """
    sides, members = plan.sides, np.array(plan.members, dtype=np.int64)
    count = _Count(sides, members, np.zeros_like(members) if nodes is None else nodes)
    for kinds in sides.alike():
        count.add_kind(kinds[0], sum(kind.itemsize for kind in kinds))
    kept, cast, sent, received = map(_whole, (count.kept, count.cast, count.sent, count.received))
    return Picture(members, kept, cast, sent, received, count.by_node)


def memory_of(plan: SwitchPlan, found: Picture, budget_bytes: int) -> Ints:
    """Return the memory of each of the plan's members, as three rows: state before, state after, bytes in flight.

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
    total = np.zeros(layout.world_size)
    for number, start, stop in _held(cut, vps.bases):
        total += np.bincount(number, stop - start, len(total))
    return _whole(total)


def _whole(sums: Floats) -> Ints:
    return np.rint(sums).astype(np.int64)


def _held(cut: Sharding, bases: Ints, parts: int = 1) -> Iterator[Rows]:
    """Yield the runs that each rank of a sharding holds, in several portions.

    bases: the first coordinate of each tensor, and the end of the line.
    parts: the maximum number of portions into which the runs of a rank that holds whole tensors may be divided.
    """
    if cut.shared is None:
        start, stop = cut.region()
        step = max(1, ROWS_AT_ONCE // cut.ranks)
        for low in range(0, len(bases) - 1, step):
            window = bases[[low, min(low + step, len(bases) - 1)]]
            _, _, first, last = interval.intersect(start, stop, window[:1], window[1:])
            _, first, last, rank = cut.holders(first, last)
            yield rank, first, last
        return
    for ranks, start, stop in cut.shared:
        step = max(1, ROWS_AT_ONCE // max(1, parts, len(start)))
        for some in np.split(ranks, range(step, len(ranks), step)):
            yield np.repeat(some, len(start)), np.tile(start, len(some)), np.tile(stop, len(some))


class _Count:
    """Running sums of the bytes of a plan: arrays with an entry per member, as in `Picture`.

    The state kinds are added one by one.
    """

    def __init__(self, sides: Sides, members: Ints, nodes: Ints) -> None:
        """Start with all sums at 0."""
        self._sides, self._node, self._nodes = sides, nodes, int(nodes.max(initial=0)) + 1
        self._sender, self._receiver = (np.searchsorted(members, each) for each in (sides.vps.members, sides.members))
        self.kept, self.cast = np.zeros(len(members)), np.zeros(len(members))
        self.sent, self.received = np.zeros((2, len(members))), np.zeros((2, len(members)))
        self.by_node = np.zeros((self._nodes, self._nodes))

    def add_kind(self, kind: Kind, nbytes: int) -> None:
        """Add the bytes that all ranks move for the kinds that are sharded like `kind`.

        nbytes: the bytes per element, summed over these kinds.
        """
        sides, every = self._sides, np.arange(len(self._receiver), dtype=np.int64)
        target, read = sides.target(kind.name), sides.source(sides.read_from(kind))
        steps = [(self.kept, sides.source(name), sides.source_ranks) for name in kind.sources]
        if kind.derived_from is not None:
            steps.append((self.cast, sides.target(kind.derived_from), every))
        has_relays, lacking, parts = sides.has_relays(kind), [NO_ROWS[:2]], 1
        if target.shared is not None and not has_relays:
            parts = TURNS * read.ranks if read.has_copies else len(read.owners(*read.region())[0])
        for rank, start, stop in _held(target, sides.vps.bases, parts):
            for total, cut, holder in steps:
                before = np.bincount(rank, stop - start, len(every))
                row, start, stop = cut.lacking(start, stop, holder[rank])
                rank = rank[row]
                total[self._receiver] += (before - np.bincount(rank, stop - start, len(every))) * nbytes
            if has_relays:
                missing = interval.union(start, stop)
                _, low, high, _ = read.owners(*missing)
                self._check_held(kind, rank, missing.numel - int((high - low).sum()))
                lacking.append(missing)
            else:
                self._check_held(kind, rank, self._add_direct(read, rank, start, stop, nbytes))
        if has_relays:
            self._add_relayed(kind, read, interval.union(*join(lacking)), nbytes)

    def _add_relayed(self, kind: Kind, read: Sharding, lacking: Runs, nbytes: int) -> None:
        """Add the bytes that ranks receive of a kind with relays, for a few nodes at a time.

        lacking: the runs that some rank receives.
        """
        sides, runs = self._sides, len(lacking.start)
        firsts = np.unique(sides.target_nodes, return_index=True)[1] if runs else interval.ints([])
        turns = TURNS * read.ranks // sides.layout.pipe  # each node needs only the tensors of one or two stages
        step = max(1, ROWS_AT_ONCE // (8 * (runs + RELAYED_PARTS + turns)))
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
            self._add_direct(read, rank[is_direct], low[is_direct], high[is_direct], nbytes)
            self._add(self._receiver[giver[~is_direct]], rank[~is_direct], size[~is_direct])

    def _add_direct(self, read: Sharding, rank: Ints, start: Ints, stop: Ints, nbytes: int) -> int:
        """Add the bytes that ranks receive directly. Return the number of elements that no source rank holds.

        nbytes: the bytes per element.
        """
        row, low, high, sender = self._sides.dealt(read, start, stop, rank)
        self._add(self._sender[sender], rank[row], (high - low) * nbytes)
        return int((stop - start).sum() - (high - low).sum())

    def _add(self, giver: Ints, rank: Ints, size: Ints) -> None:
        """Add bytes that members send to target ranks.

        giver: the sending members, as indices into `members`.
        """
        taker = self._receiver[rank]
        out_of, into = self._node[giver], self._node[taker]
        is_apart, count = (out_of != into) * len(self._node), len(self._node)
        self.sent += np.bincount(is_apart + giver, size, 2 * count).reshape(2, -1)
        self.received += np.bincount(is_apart + taker, size, 2 * count).reshape(2, -1)
        # cheaper when there are few pairs of members but many pairs of nodes
        np.add.at(self.by_node.reshape(-1), out_of * self._nodes + into, size)

    def _check_held(self, kind: Kind, ranks: Ints, lost: int) -> None:
        """Raise SwitchRefused if one of the ranks lacks some of the `lost` elements, which no source rank holds."""
        for rank in np.unique(ranks).tolist() if lost else ():
            needs = self._sides.needs(kind, rank, int(self._sides.source_ranks[rank]))
            self._sides.senders(kind, rank, needs.remote)


@dataclass(frozen=True)
class Cost:
    """The cost of a switch, or of one member's part in it.

    bytes_sent: the total over all members.
    bytes_busiest: bytes in the busiest direction of the busiest member, for which all others wait.
    highest_peak_bytes: the bytes of a member's state before and after the switch plus its bytes in flight, on the
    member with the most.
    seconds: the time to transfer `bytes_busiest` at the given bandwidth.
    """

    bytes_sent: int = 0
    bytes_busiest: int = 0
    highest_peak_bytes: int = 0
    seconds: float = 0.0


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the estimated cost of a plan.

    budget_bytes: the maximum number of bytes in flight per member.
    bytes_per_second: the bandwidth of a member in each direction.
    """
    found = picture_of(plan)
    busiest = int(np.maximum(found.gives, found.takes).max(initial=0))
    peak = int(memory_of(plan, found, budget_bytes).sum(0).max(initial=0))
    return Cost(int(found.gives.sum()), busiest, peak, busiest / bytes_per_second)


def peak_bytes(plan: SwitchPlan, member: int, in_flight_bytes: int) -> int:
    """Return the bytes of a member's state before and after the switch plus its bytes in flight."""
    sides = plan.sides
    before = sides.vps.layout, sides.source_rank.get(member, ABSENT), plan.kinds
    after = sides.layout, sides.target_rank.get(member, ABSENT), plan.kinds_after
    held = (held_bytes(sides.vps, layout, kinds, rank) for layout, rank, kinds in (before, after) if rank != ABSENT)
    return in_flight_bytes + sum(int(each[0]) for each in held)
