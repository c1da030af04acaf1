"""How a layout of several axes holds one state kind: a sharding for each shard group of its mesh, all on one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_dynatrain.space import interval
from ds_dynatrain.space.mesh import IndexMap, Mesh, ShardGroup
from ds_dynatrain.space.pieces import BufferId, Pieces
from ds_dynatrain.space.sharding import ABSENT, Sharding
from ds_dynatrain.space.tensor import Ints

Cutter = Callable[[ShardGroup], Sharding]
"""The sharding of one kind on a shard group's local line, over the ranks of the shard group."""


@dataclass(frozen=True, eq=False)
class GroupedSharding:
    """A sharding of ranks of the whole layout and coordinates of the logical line.

    cuts: of each shard group of the mesh. buffers: of all ranks, by the numbers of the local buffers.
    """

    mesh: Mesh
    cuts: tuple[Sharding, ...]
    buffers: tuple[BufferId, ...]

    replicated = False

    @staticmethod
    def of(mesh: Mesh, cutter: Cutter) -> GroupedSharding:
        """One kind, cut shard group by shard group."""
        cuts = tuple(cutter(group) for group in mesh.shard_groups)
        different = {id(cut.buffers): cut.buffers for cut in cuts}  # most shard groups share one table
        table = tuple(dict.fromkeys(name for names in different.values() for name in names))
        return GroupedSharding(mesh, cuts, table)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.mesh.layout.world_size

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds an element."""
        return all(cut.is_empty for cut in self.cuts)

    def holding(self, rank: int) -> Pieces:
        """What a rank holds."""
        return self._pieces(rank, lambda cut, index: cut.holding(index), lambda group: group.index_map)

    def owned(self, rank: int) -> Pieces:
        """The part of `holding` that the rank owns: over all ranks these tile the kind."""
        return self._pieces(rank, lambda cut, index: cut.owned(index), lambda group: group.primary)

    def region(self) -> tuple[Ints, Ints]:
        """The runs that the ranks hold together, touching ones joined."""
        found = []
        for group, cut in self._pairs():
            _, _, start, stop = group.index_map.to_line(*cut.region())
            found.append((start, stop))
        start, stop = (np.concatenate(column) for column in zip(*found, strict=True))
        return interval.union(start, stop)

    @cached_property
    def shared(self) -> list[tuple[Ints, Ints, Ints]] | None:
        """(ranks, start, stop), group by group, of what all its ranks hold alike; None if they hold parts of it."""
        if not all(cut.replicated for cut in self.cuts):
            return None
        runs = [group.index_map.to_line(*cut.region())[2:] for group, cut in self._pairs()]
        return [(group.ranks, *interval.union(*each)) for group, each in zip(self.mesh.shard_groups, runs, strict=True)]

    def owners(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut runs by the one rank that owns each element: (row, start, stop, rank), in the order of the rows.

        Of several shard groups that hold it the first, and of its ranks the one that its own sharding names.
        """
        parts = [self._over(group, group.primary, cut.owners, start, stop) for group, cut in self._pairs()]
        return _in_order(parts)

    def holders(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Every rank that holds a part of a run: (row, start, stop, rank), in the order of the rows."""
        parts = [self._over(group, group.index_map, cut.holders, start, stop) for group, cut in self._pairs()]
        return _in_order(parts)

    def lacking(self, start: Ints, stop: Ints, holder: Ints) -> tuple[Ints, Ints, Ints]:
        """What of each row its `holder`, a rank or `ABSENT`, does not hold: (row, start, stop)."""
        row = np.arange(len(start), dtype=np.int64)
        for group, cut in self._pairs():
            index = _index_in(group.ranks, holder[row])
            away, here = np.flatnonzero(index == ABSENT), np.flatnonzero(index != ABSENT)
            if not len(here):
                continue
            beyond, low, high = interval.subtract(start[here], stop[here], group.index_map.start, group.index_map.stop)
            part, line, first, last = group.index_map.to_local(start[here], stop[here])
            left, begin, end = cut.lacking(first, last, index[here][part])
            at = line[left] + begin - first[left]
            row = np.concatenate([row[away], row[here[beyond]], row[here[part[left]]]])
            start, stop = (
                np.concatenate(columns) for columns in ((start[away], low, at), (stop[away], high, at + end - begin))
            )
        order = np.lexsort((start, row))
        return row[order], start[order], stop[order]

    def place(self, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Where runs lie in the buffers of the ranks that hold them: (row, start, stop, buffer, offset), row by row.

        rank: one per row; each must hold its row.
        """
        nothing = np.empty(0, np.int64)
        parts = [(nothing, nothing, nothing, nothing, nothing)]
        for group, cut in self._pairs():
            index = _index_in(group.ranks, rank)
            rows = np.flatnonzero(index != ABSENT)
            if not len(rows):
                continue
            row, line, low, high = group.index_map.to_local(start[rows], stop[rows])
            part, first, last, buffer, offset = cut.place(low, high, index[rows][row])
            begin = line[part] + first - low[part]
            parts.append((rows[row][part], begin, begin + last - first, self._code(cut)[buffer], offset))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        row, low, high, buffer, offset = (column[order] for column in columns)
        return row, low, high, buffer, offset

    @cached_property
    def _codes(self) -> dict[int, Ints]:
        """The numbers of a cut's buffers in `buffers`, by the identity of its table."""
        number = {name: index for index, name in enumerate(self.buffers)}
        tables = {id(cut.buffers): cut.buffers for cut in self.cuts}
        return {key: np.array([number[name] for name in names] or [0], np.int64) for key, names in tables.items()}

    def _code(self, cut: Sharding) -> Ints:
        return self._codes[id(cut.buffers)]

    def _pairs(self) -> Iterator[tuple[ShardGroup, Sharding]]:
        return zip(self.mesh.shard_groups, self.cuts, strict=True)

    def _pieces(
        self, rank: int, held: Callable[[Sharding, int], Pieces], index_map: Callable[[ShardGroup], IndexMap]
    ) -> Pieces:
        parts = [Pieces.empty(self.buffers)]
        for group, cut in self._pairs():
            index = np.flatnonzero(group.ranks == rank)
            if not len(index):
                continue
            local = held(cut, int(index[0]))
            row, first, start, stop = index_map(group).to_line(local.start, local.stop)
            offset = local.offset[row] + first - local.start[row]
            parts.append(Pieces(start, stop, self._code(cut)[local.buffer[row]], offset, self.buffers))
        start, stop, buffer, offset = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("start", "stop", "buffer", "offset")
        )
        order = np.argsort(start, kind="stable")
        return Pieces(start[order], stop[order], buffer[order], offset[order], self.buffers).coalesce()

    @staticmethod
    def _over(
        group: ShardGroup,
        index_map: IndexMap,
        ask: Callable[[Ints, Ints], tuple[Ints, Ints, Ints, Ints]],
        start: Ints,
        stop: Ints,
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """What a shard group's sharding answers of runs, in coordinates of the logical line and ranks of the layout."""
        row, line, low, high = index_map.to_local(start, stop)
        part, first, last, index = ask(low, high)
        begin = line[part] + first - low[part]
        return row[part], begin, begin + last - first, group.ranks[index]


def _index_in(ranks: Ints, rank: Ints) -> Ints:
    """Place of each rank among `ranks`, or ABSENT."""
    order = np.argsort(ranks)
    at = np.minimum(np.searchsorted(ranks[order], rank), len(ranks) - 1)
    return np.where(ranks[order][at] == rank, order[at], ABSENT)


def _in_order(parts: list[tuple[Ints, Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints, Ints]:
    row, low, high, rank = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((low, row))
    return row[order], low[order], high[order], rank[order]
