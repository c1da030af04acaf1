"""The usual sharding: equal parts, or all of it on every rank.

The line falls into segments (a run of a flat buffer of ZeRO-1/2, a tensor of ZeRO-3, a whole tensor). A segment lies
in one piece somewhere in a flat order, its first element at position `lead`; that order is cut in parts of a fixed
`width`, and rank r holds the positions [r * width, (r + 1) * width), the first of them at `at` elements into its
buffer. Where the kind is replicated, each rank holds the whole segment, from `at` on. Owner and address of any
coordinate follow by integer division, so a rank finds its peers without walking over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import interval
from ds_dynatrain.space.pieces import BufferId, Pieces
from ds_dynatrain.space.sharding import ABSENT
from ds_dynatrain.space.tensor import Ints


@dataclass(frozen=True, eq=False)
class EvenSharding:
    """How a world of `ranks` ranks holds one kind. All arrays have one entry per segment, sorted by start and disjoint.

    start, stop: coordinates. width: elements of a rank's part (the segment's length if replicated). buffer: index into
    `buffers`. at: where a rank's part begins in the buffer, in elements (the segment itself, if replicated). lead: the
    segment's first position in the order that is cut, 0 if replicated. The buffers are the same on every rank.
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

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds an element."""
        return not len(self.start)

    def holding(self, rank: int) -> Pieces:
        """What a rank holds; LayoutError for a rank outside of the world."""
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
        """The part of `holding` that the rank owns: over all ranks these tile the kind, replicated or not."""
        held = self.holding(rank)
        if not self.replicated:
            return held
        row, low, high, owner = self.owners(held.start, held.stop)
        mine = owner == rank
        return held.take(row[mine], low[mine], high[mine])

    def only(self, rows: npt.NDArray[np.bool_]) -> EvenSharding:
        """Some of the segments; a replicated kind's owners are then an even split of what is left."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        cut: dict[str, Any] = {name: held[rows] for name, held in columns.items() if isinstance(held, np.ndarray)}
        return replace(self, **cut)

    def region(self) -> tuple[Ints, Ints]:
        """The runs that the ranks hold together, touching ones joined."""
        return interval.union(self.start, self.stop)

    @cached_property
    def shared(self) -> list[tuple[Ints, Ints, Ints]] | None:
        """(ranks, start, stop) of what all ranks hold alike; None if they hold parts of it."""
        return [(np.arange(self.ranks), *self.region())] if self.replicated else None

    def owners(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut runs by the rank that owns each element: (row, start, stop, rank); what nobody holds is left out.

        Of a replicated kind every rank is a holder; its owners are an even split of the segments' span over the ranks.
        """
        row, segment, low, high = interval.intersect(start, stop, self.start, self.stop)
        if self.replicated:
            base = np.zeros(len(low), np.int64) + (self.start[0] if len(self.start) else 0)
            width = np.full(len(low), self._even_width())
        else:
            base, width = (self.start - self.lead)[segment], self.width[segment]
        part, low, high, rank = interval.cut_every(low - base, high - base, width)
        return row[part], low + base[part], high + base[part], rank

    def holders(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Every rank that holds a part of a run: (row, start, stop, rank)."""
        if not self.replicated:
            return self.owners(start, stop)
        row, _, low, high = interval.intersect(start, stop, *self.region())
        rank = np.repeat(np.arange(self.ranks, dtype=np.int64), len(row))
        return np.tile(row, self.ranks), np.tile(low, self.ranks), np.tile(high, self.ranks), rank

    def lacking(self, start: Ints, stop: Ints, holder: Ints) -> tuple[Ints, Ints, Ints]:
        """What of each row its `holder`, a rank or `ABSENT`, does not hold: (row, start, stop)."""
        absent = holder == ABSENT
        row, low, high = interval.subtract(start, stop, *self.region())
        beyond = ~absent[row]
        parts = [(np.flatnonzero(absent), start[absent], stop[absent]), (row[beyond], low[beyond], high[beyond])]
        if not self.replicated:
            row, low, high, owner = self.owners(start, stop)
            others = ~absent[row] & (owner != holder[row])
            parts.append((row[others], low[others], high[others]))
        rows, low, high = (np.concatenate(column) for column in zip(*parts, strict=True))
        return rows, low, high

    def _even_width(self) -> int:
        span = int(self.stop[-1] - self.start[0]) if len(self.start) else 0
        return max(1, -(-span // self.ranks))

    def place(self, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Where runs lie in the buffers of the ranks that hold them: (row, start, stop, buffer, offset).

        rank: one per row; each must hold its row. Rows are cut where the buffer or the step in it changes.
        """
        row, segment, low, high = interval.intersect(start, stop, self.start, self.stop)
        offset = (self.at + self.lead - self.start)[segment] + low
        if not self.replicated:
            offset = offset - rank[row] * self.width[segment]
        return row, low, high, self.buffer[segment], offset
