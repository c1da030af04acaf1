"""Shardings: how one layout distributes one state kind over all ranks.

Three classes have the same methods. `EvenSharding` gives every rank an equal part, or the whole. `OverlappingSharding`
keeps whole tensors on several ranks. `GroupedSharding` combines one of these per shard group: the ranks to which the
pipe, expert and tensor axes assign the same tensors. Methods take and return runs (contiguous ranges of coordinates) as
arrays. A *row* is the index of a run in the query, and each part of a result names the row that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import interval
from ds_dynatrain.space.interval import AnyRows, Ints, Runs, join
from ds_dynatrain.space.mesh import Mesh, ShardGroup
from ds_dynatrain.space.strips import PLAIN
from ds_dynatrain.space.tensor import BufferId, CoordinateLine, Pieces

Owned = tuple[Ints, Ints, Ints, Ints]
"""Runs and a rank that owns or holds each of them, as arrays (row, start, stop, rank)."""
Rows = tuple[Ints, Ints, Ints]
"""Runs as arrays (row, start, stop); or runs that all of several ranks hold, as (ranks, start, stop)."""
Placed = tuple[Ints, Ints, Ints, Ints, Ints, Ints]
"""Runs and their places in buffers, as arrays (row, start, stop, buffer, offset of the first element, step).

If the run is part of a strip with several rows, `step` is their distance in the buffer; otherwise it is `PLAIN`."""

ABSENT = -1
"""Sentinel rank: no owner."""


class Copies(NamedTuple):
    """Runs that every rank of one shard group holds.

    ranks: the ranks in group order.
    experts: whether the runs are of expert tensors.
    each: the number of elements of all expert tensors (or of all other tensors), divided by the number of all ranks and
        rounded up.
    start, stop: the runs.
    """

    ranks: Ints
    experts: bool
    each: int
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class EvenSharding:
    """The usual sharding over a group of `ranks` ranks: an equal part on each rank, or the whole on every rank.

    The coordinate line is divided into segments: runs of a flat buffer (ZeRO-1/2), tensors (ZeRO-3) or whole tensors.
    A segment is contiguous in some flat order, in which its first element has position `lead`. That order is cut into
    parts of a fixed `width`: rank r holds the positions [r * width, (r + 1) * width), beginning `at` elements into its
    buffer. If the kind is replicated, each rank holds the whole segment, beginning at `at`. The owner and the address
    of a coordinate follow by integer division, so a rank finds its peers without iterating over all ranks.

    All arrays have one entry per segment; segments are disjoint and sorted by start.

    start, stop: coordinates.
    width: elements in a rank's part (the segment's length if replicated).
    buffer: index into `buffers`.
    at: where a rank's part begins in the buffer, in elements (where the segment begins, if replicated).
    lead: the segment's first position in the flat order, 0 if replicated. The buffers are the same on every rank.
    """

    start: Ints
    stop: Ints
    width: Ints
    buffer: Ints
    at: Ints
    lead: Ints
    buffers: tuple[BufferId, ...]
    ranks: int
    replicated: bool

    def holding(self, rank: int) -> Pieces:
        """Return the pieces that a rank holds. Raises LayoutError if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank {rank} is not in a world of {self.ranks}; give 0 to {self.ranks - 1}")
        if self.replicated:
            start, stop, offset = self.start, self.stop, self.at
        else:
            first = self.start - self.lead + rank * self.width
            start, stop = np.maximum(first, self.start), np.minimum(first + self.width, self.stop)
            offset = self.at + start - first
        keep = start < stop
        return Pieces(start[keep], stop[keep], self.buffer[keep], offset[keep], self.buffers).coalesce()

    def owned(self, rank: int) -> Pieces:
        """Return the pieces that a rank owns. Each element has exactly one owner, even if several ranks hold it."""
        held = self.holding(rank)
        if not self.replicated:
            return held
        row, low, high, owner = self.owners(held.start, held.stop)
        mine = owner == rank
        return held.take(row[mine], low[mine], high[mine])

    def only(self, rows: npt.NDArray[np.bool_]) -> EvenSharding:
        """Return a sharding with the selected segments only.

        If the kind is replicated, ownership is divided evenly over the span of the remaining segments.
        """
        columns = ("start", "stop", "width", "buffer", "at", "lead")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def region(self) -> tuple[Ints, Ints]:
        """Return the runs that at least one rank holds, with adjacent runs merged."""
        return interval.union(self.start, self.stop)

    @cached_property
    def shared(self) -> list[Rows] | None:
        """The runs that all ranks hold, as (ranks, start, stop); None if each rank holds only a part."""
        return [(np.arange(self.ranks), *self.region())] if self.replicated else None

    def owners(self, start: Ints, stop: Ints) -> Owned:
        """Split runs by the rank that owns each element, and return them as (row, start, stop, rank).

        Elements without an owner are left out. If the kind is replicated, ownership is divided evenly over the span of
        the segments.
        """
        row, segment, low, high = interval.intersect(start, stop, self.start, self.stop)
        if self.replicated and len(self.start):
            span = int(self.stop[-1] - self.start[0])
            base, width = np.full(len(low), self.start[0]), np.full(len(low), max(1, -(-span // self.ranks)))
        else:
            base, width = (self.start - self.lead)[segment], self.width[segment]
        part, low, high, rank = interval.cut_every(low - base, high - base, width)
        return row[part], low + base[part], high + base[part], rank

    @property
    def has_copies(self) -> bool:
        """Whether all ranks hold the same elements."""
        return self.replicated

    def copies(self, start: Ints, stop: Ints) -> Iterable[Copies]:
        """Return the runs of which every rank holds a copy. The arguments are ignored here."""
        return self.copies_of(0)

    def copies_of(self, rank: int) -> list[Copies]:
        """Return the runs of which every rank holds a copy, whichever rank is asked about."""
        each = -(-int((self.stop - self.start).sum()) // self.ranks)
        return [Copies(np.arange(self.ranks), False, each, *self.region())]

    def holders(self, start: Ints, stop: Ints) -> Owned:
        """Return, for each rank, the parts of the given runs that it holds, as (row, start, stop, rank)."""
        if not self.replicated:
            return self.owners(start, stop)
        row, _, low, high = interval.intersect(start, stop, *self.region())
        rank = np.repeat(np.arange(self.ranks, dtype=np.int64), len(row))
        return np.tile(row, self.ranks), np.tile(low, self.ranks), np.tile(high, self.ranks), rank

    def held(self, start: Ints, stop: Ints, holder: Ints) -> Rows:
        """Return the parts of each row that the rank `holder[row]` holds, as (row, start, stop).

        A row has no parts if `holder[row]` is ABSENT.
        """
        row, segment, low, high = interval.intersect(start, stop, self.start, self.stop)
        if not self.replicated:
            part = (self.start - self.lead)[segment] + holder[row] * self.width[segment]
            low, high = np.maximum(low, part), np.minimum(high, part + self.width[segment])
        keep = (low < high) & (holder[row] != ABSENT)
        return row[keep], low[keep], high[keep]

    def lacking(self, start: Ints, stop: Ints, holder: Ints) -> Rows:
        """Return the parts of each row that the rank `holder[row]` does not hold, as (row, start, stop).

        This is the whole row if `holder[row]` is ABSENT.
        """
        return interval.outside(start, stop, *self.held(start, stop, holder))

    def candidates(self, start: Ints, stop: Ints) -> Ints:
        """Return the ranks that may hold some of the given coordinates."""
        return np.arange(self.ranks, dtype=np.int64)

    def place(self, start: Ints, stop: Ints, rank: Ints) -> Placed:
        """Return where runs lie in the buffers of the given ranks, as (row, start, stop, buffer, offset, step).

        rank: one per row; each rank must hold its row. Rows are split where they are not contiguous in one buffer.
        """
        row, segment, low, high = interval.intersect(start, stop, self.start, self.stop)
        offset = (self.at + self.lead - self.start)[segment] + low
        if not self.replicated:
            offset = offset - rank[row] * self.width[segment]
        return row, low, high, self.buffer[segment], offset, np.full_like(row, PLAIN)


@dataclass(frozen=True, eq=False)
class OverlappingSharding(EvenSharding):
    """A sharding of ZeRO stages 1 and 2 in which a rank that owns a part of a tensor holds the whole tensor.

    DeepSpeed's Muon orthogonalizes whole matrices, so every rank that owns a part of a matrix keeps the momentum of the
    whole matrix (0.19.8: `runtime/zero/stage_1_and_2.py` `get_flat_partition`). A rank's tensors of an optimizer group
    lie end to end from the start of a buffer, in the order of the flat group but without its alignment gaps. A rank
    without a part of the group has no such buffer. An element belongs to the rank that owns it in the flat group.

    The fields of `EvenSharding` describe the ordinary sharding of flat groups. The arrays here have one entry per
    tensor.
    first_at, end: the tensor's coordinates, sorted.
    group: index into `buffers`.
    before: number of elements in all tensors before this one, in the flat order of one group after the other.
    first: the first rank that holds the tensor.
    last: the last rank that holds the tensor. All ranks between `first` and `last` hold it as well.
    reach: sorted search keys, group * ranks + last, in flat order: a search finds the first tensor that a rank holds.
    opening: `before` in the order of `reach`: the flat position at which a rank's buffer begins if this is its first
        tensor.
    """

    first_at: Ints
    end: Ints
    group: Ints
    before: Ints
    first: Ints
    last: Ints
    reach: Ints
    opening: Ints

    @staticmethod
    def of(line: CoordinateLine, part: EvenSharding) -> OverlappingSharding:
        """Build the sharding from the tensors of `line` and from `part`, their sharding in flat groups."""
        filled = np.flatnonzero(line.numels)
        row, _, start, stop = interval.intersect(part.start, part.stop, line.bases[filled], line.bases[filled + 1])
        position, width, buffer = part.lead[row] + start - part.start[row], part.width[row], part.buffer[row]
        first, last = position // width, (position + stop - start - 1) // width
        order = np.lexsort((position, buffer))
        opening = np.cumsum((stop - start)[order]) - (stop - start)[order]
        at = np.empty_like(opening)
        at[order] = opening
        return OverlappingSharding(
            **{each.name: getattr(part, each.name) for each in fields(part)},
            first_at=start,
            end=stop,
            group=buffer,
            before=at,
            first=first,
            last=last,
            reach=(buffer * part.ranks + last)[order],
            opening=opening,
        )

    def holding(self, rank: int) -> Pieces:
        """Return the pieces that a rank holds."""
        held = np.flatnonzero((self.first <= rank) & (rank <= self.last))
        offset = self._offset(held, np.full_like(held, rank))
        return Pieces(self.first_at[held], self.end[held], self.group[held], offset, self.buffers).coalesce()

    def owned(self, rank: int) -> Pieces:
        """Return the pieces that a rank owns: a part of those that it holds. Each element has exactly one owner."""
        own = super().holding(rank)
        return self.holding(rank).restrict(own.start, own.stop)

    def holders(self, start: Ints, stop: Ints) -> Owned:
        """Return, for each rank, the parts of the given runs that it holds, as (row, start, stop, rank)."""
        row, tensor, low, high = interval.intersect(start, stop, self.first_at, self.end)
        again, nth = interval.expand((self.last - self.first + 1)[tensor])
        return row[again], low[again], high[again], self.first[tensor][again] + nth

    def held(self, start: Ints, stop: Ints, holder: Ints) -> Rows:
        """Return the parts of each row that the rank `holder[row]` holds, as (row, start, stop).

        A row has no parts if `holder[row]` is ABSENT.
        """
        row, tensor, low, high = interval.intersect(start, stop, self.first_at, self.end)
        keep = (self.first[tensor] <= holder[row]) & (holder[row] <= self.last[tensor])  # ABSENT is below every rank
        return row[keep], low[keep], high[keep]

    def place(self, start: Ints, stop: Ints, rank: Ints) -> Placed:
        """Return where runs lie in the buffers of the given ranks, as (row, start, stop, buffer, offset, step).

        rank: one per row; each rank must hold its row.
        """
        row, tensor, low, high = interval.intersect(start, stop, self.first_at, self.end)
        offset = self._offset(tensor, rank[row]) + low - self.first_at[tensor]
        return row, low, high, self.group[tensor], offset, np.full_like(row, PLAIN)

    def _offset(self, tensor: Ints, rank: Ints) -> Ints:
        """Return the offset at which each tensor begins in the buffer of the given rank, which must hold the tensor."""
        return self.before[tensor] - self.opening[np.searchsorted(self.reach, self.group[tensor] * self.ranks + rank)]


@dataclass(frozen=True, eq=False)
class GroupedSharding:
    """The sharding of a layout with several axes, which combines one sharding per shard group of the mesh.

    Methods look only at the shard groups that a query concerns. If the space has a tiling (its own order of elements),
    `holding` and `owned` return valid coordinates but no valid offsets; ask `place` for positions in buffers.

    cutter: function that returns the sharding of a shard group on its local line.
    buffers: all buffers that a rank may have; the table of each shard group is a prefix of this one.
    """

    mesh: Mesh
    cutter: Callable[[ShardGroup], Sharding]
    buffers: tuple[BufferId, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks in the world."""
        return self.mesh.layout.world_size

    @cached_property
    def replicated(self) -> bool:
        """Whether every rank holds the same elements."""
        return len(self.mesh.shard_groups) == 1 and self.cutter(self.mesh.shard_groups[0]).replicated

    def holding(self, rank: int) -> Pieces:
        """Return the pieces that a rank holds."""
        return self._pieces(rank, is_owned=False)

    def owned(self, rank: int) -> Pieces:
        """Return the pieces that a rank owns: a part of those that it holds. Each element has exactly one owner."""
        return self._pieces(rank, is_owned=True)

    def region(self) -> tuple[Ints, Ints]:
        """Return the runs that at least one rank holds, with adjacent runs merged."""
        return interval.union(*join([self._region(group, True) for group in self.mesh.shard_groups]))

    @cached_property
    def shared(self) -> list[Rows] | None:
        """The runs that all ranks of a shard group hold, as (ranks, start, stop) per group.

        None if the ranks of a group hold different parts.
        """
        groups = self.mesh.shard_groups
        if not all(self.cutter(group).replicated for group in groups):
            return None
        return [(group.ranks, *self._region(group, False)) for group in groups]

    def owners(self, start: Ints, stop: Ints) -> Owned:
        """Split runs by the rank that owns each element, and return them as (row, start, stop, rank), sorted by row.

        If several shard groups hold an element, the owner is in the first of them.
        """
        return self._ranks(start, stop, is_owned=True)

    def holders(self, start: Ints, stop: Ints) -> Owned:
        """Return, for each rank, the parts of the given runs that it holds, as (row, start, stop, rank).

        The result is sorted by row.
        """
        return self._ranks(start, stop, is_owned=False)

    @cached_property
    def has_copies(self) -> bool:
        """Whether all ranks of a shard group hold the same elements; the answer is the same for all groups."""
        return self.cutter(self.mesh.shard_groups[0]).has_copies

    def copies(self, start: Ints, stop: Ints) -> Iterable[Copies]:
        """Return, for each shard group that may hold some of the given runs, the runs that all its ranks hold.

        An element that several groups hold is returned for the first of them only.
        """
        return map(self._copies, self.mesh.groups_with(start, stop, is_primary=True))

    def copies_of(self, rank: int) -> list[Copies]:
        """Return, for each shard group of a rank, the runs that no earlier group holds."""
        numbers = [int(self.mesh.groups_of(rank, experts)[0]) for experts in self.mesh.regions]
        return [self._copies(self.mesh.shard_groups[number]) for number in numbers]

    def _copies(self, group: ShardGroup) -> Copies:
        return Copies(group.ranks, group.experts, self._each[group.experts], *self._region(group, True))

    @cached_property
    def _each(self) -> dict[bool, int]:
        """Elements of all expert tensors (key True) or of all others, divided by the number of ranks, rounded up."""
        experts, numels = self.mesh.line.experts, self.mesh.line.numels
        return {sort: -(-int(numels[experts == sort].sum()) // self.ranks) for sort in (False, True)}

    def held(self, start: Ints, stop: Ints, holder: Ints) -> Rows:
        """Return the parts of each row that the rank `holder[row]` holds, as (row, start, stop).

        A row has no parts if `holder[row]` is ABSENT.
        """
        parts = [(np.empty(0, np.int64),) * 3]
        for group, rows, low, high, index in self._by_group(start, stop, holder):
            hulls = self.mesh.index_map(group, False).hulls(low, high)
            part, first, last = self.cutter(group).held(hulls.first, hulls.last, index[hulls.row])
            kept, begin, end = hulls.back(part, first, last)
            parts.append((rows[hulls.row[part[kept]]], begin, end))
        return _in_order(parts)

    def lacking(self, start: Ints, stop: Ints, holder: Ints) -> Rows:
        """Return the parts of each row that the rank `holder[row]` does not hold, as (row, start, stop).

        This is the whole row if `holder[row]` is ABSENT.
        """
        return interval.outside(start, stop, *self.held(start, stop, holder))

    def candidates(self, start: Ints, stop: Ints) -> Ints:
        """Return the ranks that may hold some of the given coordinates, each once."""
        groups = self.mesh.groups_with(start, stop, is_primary=False)
        return np.unique(np.concatenate([np.empty(0, np.int64), *(group.ranks for group in groups)]))

    def place(self, start: Ints, stop: Ints, rank: Ints) -> Placed:
        """Return where runs lie in the buffers of the given ranks, as (row, start, stop, buffer, offset, step).

        rank: one per row; each rank must hold its row. The result is sorted by row.
        """
        parts = [(np.empty(0, np.int64),) * 6]
        for group, rows, low, high, index in self._by_group(start, stop, rank):
            cut, hulls = self.cutter(group), self.mesh.index_map(group, False).hulls(low, high)
            part, first, last, buffer, offset, _ = cut.place(hulls.first, hulls.last, index[hulls.row])
            kept, begin, end = hulls.back(part, first, last)
            part, strip = part[kept], hulls.strip[part[kept]]
            offset = offset[kept] + hulls.strips.address_of(strip, begin) - first[kept]
            parts.append((rows[hulls.row[part]], begin, end, buffer[kept], offset, hulls.strips.step[strip]))
        return _in_order(parts)

    def _by_group(self, start: Ints, stop: Ints, rank: Ints) -> Iterator[tuple[ShardGroup, Ints, Ints, Ints, Ints]]:
        """Yield the given rows by shard group, as (group, rows, start, stop, index of the rank in the group).

        Rows are split where expert tensors begin or end. Rows whose rank is ABSENT are left out.
        """
        for experts, (first, last) in self.mesh.regions.items():
            row, _, low, high = interval.intersect(start, stop, first, last)
            row, low, high = (column[rank[row] != ABSENT] for column in (row, low, high))
            number, index = self.mesh.groups_of(rank[row], experts)
            order = np.argsort(number, kind="stable")
            numbers, begins = np.unique(number[order], return_index=True)
            for one, mine in zip(numbers.tolist(), np.split(order, begins[1:]), strict=False):
                yield self.mesh.shard_groups[one], row[mine], low[mine], high[mine], index[mine]

    @cached_property
    def _region(self) -> Callable[[ShardGroup, bool], Runs]:
        """A cached function (shard group, is_primary) -> the runs that the ranks of the group hold.

        is_primary: whether to leave out runs that an earlier group also holds.
        """

        @cache
        def region(group: ShardGroup, is_primary: bool) -> Runs:
            return interval.union(
                *self.mesh.index_map(group, is_primary).at_addresses(*self.cutter(group).region())[2:]
            )

        return region

    def _pieces(self, rank: int, is_owned: bool) -> Pieces:
        """Return the pieces that a rank holds or, if `is_owned`, those that it owns."""
        parts = [Pieces.empty(self.buffers)]
        for experts in self.mesh.regions:
            number, index = map(int, self.mesh.groups_of(rank, experts))
            group = self.mesh.shard_groups[number]
            cut, strips = self.cutter(group), self.mesh.index_map(group, is_owned)
            local = cut.owned(index) if is_owned else cut.holding(index)
            row, strip, start, stop = strips.at_addresses(local.start, local.stop)
            offset = local.offset[row] + strips.address_of(strip, start) - local.start[row]
            parts.append(Pieces(start, stop, local.buffer[row], offset, self.buffers))
        return Pieces(*join([part.columns for part in parts]), self.buffers).tidy()

    def _ranks(self, start: Ints, stop: Ints, is_owned: bool) -> Owned:
        """Split runs by the rank that holds each element or, if `is_owned`, by the one that owns it."""
        parts = [(np.empty(0, np.int64),) * 4]
        for group in self.mesh.groups_with(start, stop, is_owned):
            cut, hulls = self.cutter(group), self.mesh.index_map(group, is_owned).hulls(start, stop)
            part, first, last, index = (cut.owners if is_owned else cut.holders)(hulls.first, hulls.last)
            kept, begin, end = hulls.back(part, first, last)
            parts.append((hulls.row[part[kept]], begin, end, group.ranks[index[kept]]))
        return _in_order(parts)


Sharding = EvenSharding | GroupedSharding


def _in_order(parts: list[AnyRows]) -> AnyRows:
    """Join several parts, each with columns (row, start, ...), and sort them by row and then by start."""
    columns = join(parts)
    order = np.lexsort((columns[1], columns[0]))
    return cast("AnyRows", tuple(column[order] for column in columns))
