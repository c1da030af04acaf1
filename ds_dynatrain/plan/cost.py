"""Costs of a switch: bytes by member and by node, peak memory, and time.

The whole picture of a plan is computed for all ranks at once. State kinds that are sharded alike are counted once. If
ZeRO divides a kind, the runs of all ranks are one set of rows. If the ranks of a shard group hold a kind whole, ranks
whose members come from the same places form a *class*: they lack the same runs, except those that each of them has in
a part of its own (of another stage, or of the masters from which it casts), and these are taken off rank by rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_dynatrain.plan.plan import SwitchPlan
from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import ABSENT, Kind, Layout, Sharding, VirtualParameterSpace, interval, row_of
from ds_dynatrain.space.interval import Ints, join
from ds_dynatrain.space.sharding import Owned

Floats = npt.NDArray[np.float64]
Rows = tuple[Ints, Ints, Ints]
"""Runs of coordinates as arrays: (class or rank, start, stop)."""
ROWS_AT_ONCE = 1 << 20
"""How many runs are collected before they are counted."""


@dataclass(frozen=True)
class Cost:
    """The cost of a switch, or of one member's part in it.

    bytes_sent: the total over all members.
    bytes_busiest: bytes in the busiest direction of the busiest member, for which all others wait.
    highest_peak_bytes: the largest of `peak_bytes`.
    peak_bytes: for each member, the bytes of its state before and after the switch plus its bytes in flight.
    seconds: the time to transfer `bytes_busiest` at the given bandwidth.
    """

    bytes_sent: int = 0
    bytes_busiest: int = 0
    highest_peak_bytes: int = 0
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class PlanTraffic:
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


def whole_traffic(plan: SwitchPlan, nodes: Ints | None = None) -> PlanTraffic:
    """Return the bytes of a whole plan, by member and by node.

    nodes: the number of the node of each of `plan.members`; None for one node.
    """
    sides, members = plan.sides, np.array(plan.members, dtype=np.int64)
    places = np.zeros_like(members) if nodes is None else nodes
    count = _Count(sides, members, places)
    for kind, nbytes in alike(sides.kinds):
        count.add_kind(kind, nbytes)
    kept, cast, sent, received = map(_whole, (count.kept, count.cast, count.sent, count.received))
    return PlanTraffic(members, kept, cast, sent, received, count.by_node)


def alike(kinds: Collection[Kind]) -> list[tuple[Kind, int]]:
    """Return (kind, bytes of an element of all of them) for each set of kinds that every layout shards alike."""
    found: dict[object, tuple[Kind, int]] = {}
    for kind in kinds:
        row = row_of(kind.name)
        own = kind.groups, kind.whole_tensors, kind.sources[1:], kind.derived_from
        key = (row.stages, row.whole_in, row.of_frozen, *own)
        first, nbytes = found.get(key, (kind, 0))
        found[key] = first, nbytes + kind.itemsize
    return [*found.values()]


def traffic(plan: SwitchPlan) -> dict[int, tuple[int, int]]:
    """Return a map from member to the numbers of bytes that it (sends, receives)."""
    found = whole_traffic(plan)
    both = zip(found.sent.sum(0).tolist(), found.received.sum(0).tolist(), strict=True)
    return dict(zip(plan.members, both, strict=True))


def bytes_sent(plan: SwitchPlan) -> int:
    """Return the number of bytes that all members send."""
    return int(whole_traffic(plan).sent.sum())


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the estimated cost of a plan.

    budget_bytes: the maximum number of bytes in flight per member.
    bytes_per_second: the bandwidth of a member in each direction.
    """
    found = whole_traffic(plan)
    peak = peak_bytes(plan, found, budget_bytes)
    sent, received = found.sent.sum(0), found.received.sum(0)
    busiest = int(np.maximum(sent, received).max(initial=0))
    peaks = dict(zip(plan.members, peak.tolist(), strict=True))
    return Cost(int(sent.sum()), busiest, int(peak.max(initial=0)), peaks, busiest / bytes_per_second)


def peak_bytes(plan: SwitchPlan, found: PlanTraffic, budget_bytes: int) -> Ints:
    """Return the peak memory of each of the plan's members: its state before and after, and its bytes in flight.

    found: the bytes of the plan.
    budget_bytes: the maximum number of bytes in flight per member.
    """
    sides, kinds = plan.sides, plan.sides.names
    peak: Ints = np.minimum(budget_bytes, (found.sent + found.received).sum(0))
    pairs = (sides.vps.layout, sides.vps.members, kinds), (sides.layout, sides.members, _kinds_after(sides))
    for layout, members, held in pairs:
        peak[np.searchsorted(found.members, members)] += state_bytes(sides.vps, layout, held)
    return peak


def own_peak_bytes(plan: SwitchPlan, member: int, in_flight_bytes: int) -> int:
    """Return the peak memory of one member, as `peak_bytes` does for all."""
    sides = plan.sides
    source = own_state_bytes(sides.vps, sides.vps.layout, sides.source_rank.get(member, ABSENT), sides.names)
    target = own_state_bytes(sides.vps, sides.layout, sides.target_rank.get(member, ABSENT), _kinds_after(sides))
    return source + target + in_flight_bytes


def _kinds_after(sides: Sides) -> list[str]:
    """Return the kinds that the target allocates: those that move, and gradients even if none of them moves."""
    after = list(sides.names)
    for kind in sides.vps.present_kinds(sides.layout):
        if row_of(kind).is_gradient and kind not in after:
            after.append(kind)
    return after


def own_state_bytes(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: Collection[str]) -> int:
    """Return the bytes of the given state kinds on one rank (0 if ABSENT), as `state_bytes` does for all."""
    total = 0
    for name in kinds if rank != ABSENT else ():
        kind = vps.kind(name)
        pieces = vps.holding(layout, rank, name)
        if kind.derived_from in kind.sources and kind.derived_from in kinds and layout.zero_stage in (0, 3):
            shared = vps.holding(layout, rank, str(kind.derived_from))
            pieces = pieces.subtract(shared.start, shared.stop)
        total += pieces.numel * kind.itemsize
    return total


def state_bytes(vps: VirtualParameterSpace, layout: Layout, kinds: Collection[str]) -> Ints:
    """Return the bytes of the given state kinds on each rank of a layout, without padding.

    A weight and its master are counted once if they share a buffer (stages 0 and 3 in fp32).
    """
    total = np.zeros(layout.world_size)
    for name in kinds:
        kind = vps.kind(name)
        is_shared = kind.derived_from in kind.sources and kind.derived_from in kinds and layout.zero_stage in (0, 3)
        for part in _classes(vps.sharding(layout, name), vps.bases, np.zeros(layout.world_size, np.int64)):
            rows = part.rows
            if is_shared:
                rows = _without(vps.sharding(layout, str(kind.derived_from)), rows, part.first)
            total[part.ranks] += part.each(rows, (rows[0][:0],) * 3) * kind.itemsize
    return _whole(total)


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
        """Whether each rank is a class of its own."""
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
    """Return the parts of the rows of each class that its `holder` does not hold."""
    row, start, stop = cut.lacking(rows[1], rows[2], holder[rows[0]])
    return rows[0][row], start, stop


class _Count:
    """Sums of bytes, filled kind by kind. Arrays have an entry for each member; see `PlanTraffic`."""

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
        read = sides.source(sides.read_from(kind))
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
            if not read.replicated:
                self._add_class(part, rows, read, kind, nbytes)
                row, start, stop, sender = read.owners(*apart[1:])
                self._add(sender, apart[0][row], (start - stop) * nbytes)
        if read.replicated:
            self._add_newcomers(kind, nbytes)

    def _add_class(self, part: _Classes, rows: Rows, read: Sharding, kind: Kind, nbytes: int) -> None:
        """Add what every rank of each class receives."""
        row, start, stop, sender = read.owners(*rows[1:])
        if (stop - start).sum() < (rows[2] - rows[1]).sum():  # raises SwitchRefused if a rank lacks what nobody holds
            for rank in part.ranks.tolist():
                needs = self._sides.needs(kind, rank, int(self._sides.source_ranks[rank]))
                self._sides.senders(kind, rank, needs.remote)
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
        giver, taker = self._sender[sender], self._receiver[receiver]
        out_of, into = self._node[giver], self._node[taker]
        is_apart, count = (out_of != into) * len(self._node), len(self._node)
        self.sent += np.bincount(is_apart + giver, size, 2 * count).reshape(2, -1)
        self.received += np.bincount(is_apart + taker, size, 2 * count).reshape(2, -1)
        self.by_node += np.bincount(out_of * self._nodes + into, size, self._nodes**2).reshape(self.by_node.shape)

    def _add_newcomers(self, kind: Kind, nbytes: int) -> None:
        """Add what newcomers receive of a kind that all source ranks hold: each takes even shares from all of them."""
        found: list[Rows] = []
        newcomers = np.flatnonzero(self._sides.source_ranks == ABSENT).tolist()
        for place, rank in enumerate(newcomers):
            start, stop, sender = self._sides.senders(kind, rank, self._sides.needs(kind, rank, ABSENT).remote)
            found.append((sender, np.full_like(sender, rank), (stop - start) * nbytes))
            if place + 1 == len(newcomers) or len(found) * len(sender) > ROWS_AT_ONCE:
                self._add(*join(found))
                found = []


def _places(vps: VirtualParameterSpace) -> Ints:
    """Return a number for each current rank, equal for ranks at one place of the pipe, expert and tensor axes."""
    mesh, ranks = vps.mesh(vps.layout), range(vps.layout.world_size)
    if mesh is None:
        return np.zeros(len(ranks), np.int64)
    numbers: Ints = np.unique([mesh.place(rank) for rank in ranks], axis=0, return_inverse=True)[1].reshape(-1)
    return numbers
