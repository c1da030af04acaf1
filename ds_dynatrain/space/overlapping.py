"""How ZeRO stages 1 and 2 hold a kind that keeps tensors whole: a rank's part of a flat group, widened at both ends.

DeepSpeed's Muon orthogonalizes whole matrices, so every rank that has a part of a matrix keeps the whole momentum of
it (0.19.8: `runtime/zero/stage_1_and_2.py` `get_flat_partition`). What a rank keeps of a group lies end to end from the
start of its buffer, in the order of the flat group, without the room that alignment leaves there; a rank without a part
of the group has no such buffer. The owner of an element is the rank whose ordinary part has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_dynatrain.space import interval
from ds_dynatrain.space.even import EvenSharding
from ds_dynatrain.space.kind import Kind
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.pieces import BufferId, Pieces
from ds_dynatrain.space.tensor import Ints, Line


def is_overlapping(kind: Kind, layout: Layout) -> bool:
    """Whether a layout holds the kind this way."""
    return kind.whole_tensors and layout.zero_stage in (1, 2)


@dataclass(frozen=True, eq=False)
class OverlappingSharding:
    """A sharding in which an element may have several holders.

    part: the ordinary sharding, of flat groups. The other arrays have one entry per tensor, sorted by start. start,
    stop: its coordinates. buffer: index into `buffers`. at: elements of all tensors before it, in the flat order of one
    group after the other. first, last: the ranks that hold it, and all between them do. reach: buffer x ranks + last,
    ascending in that order; opening: `at` in that order.
    """

    part: EvenSharding
    start: Ints
    stop: Ints
    buffer: Ints
    at: Ints
    first: Ints
    last: Ints
    reach: Ints
    opening: Ints

    replicated = False
    shared = None

    @staticmethod
    def of(line: Line, part: EvenSharding) -> OverlappingSharding:
        """The tensors of `line` that `part` cuts, which is over the flat groups of stage 1 or 2."""
        filled = np.flatnonzero(line.numels)
        row, _, start, stop = interval.intersect(part.start, part.stop, line.bases[filled], line.bases[filled + 1])
        position, width, buffer = part.lead[row] + start - part.start[row], part.width[row], part.buffer[row]
        first, last = position // width, (position + stop - start - 1) // width
        order = np.lexsort((position, buffer))
        opening = np.cumsum((stop - start)[order]) - (stop - start)[order]
        at = np.empty_like(opening)
        at[order] = opening
        return OverlappingSharding(
            part, start, stop, buffer, at, first, last, (buffer * part.ranks + last)[order], opening
        )

    @property
    def buffers(self) -> tuple[BufferId, ...]:
        """The buffers that a rank may have."""
        return self.part.buffers

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.part.ranks

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds an element."""
        return not len(self.start)

    def holding(self, rank: int) -> Pieces:
        """What a rank holds."""
        held = np.flatnonzero((self.first <= rank) & (rank <= self.last))
        offset = self._offset(held, np.full_like(held, rank))
        return Pieces(self.start[held], self.stop[held], self.buffer[held], offset, self.buffers).coalesce()

    def owned(self, rank: int) -> Pieces:
        """The part of `holding` that the rank owns: over all ranks these tile the kind."""
        own = self.part.owned(rank)
        return self.holding(rank).restrict(own.start, own.stop)

    def region(self) -> tuple[Ints, Ints]:
        """The runs that the ranks hold together, touching ones joined."""
        return self.part.region()

    def owners(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut runs by the rank that owns each element: (row, start, stop, rank); what nobody holds is left out."""
        return self.part.owners(start, stop)

    def holders(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Every rank that holds a part of a run: (row, start, stop, rank)."""
        row, tensor, low, high = interval.intersect(start, stop, self.start, self.stop)
        again, nth = interval.expand((self.last - self.first + 1)[tensor])
        return row[again], low[again], high[again], self.first[tensor][again] + nth

    def lacking(self, start: Ints, stop: Ints, holder: Ints) -> tuple[Ints, Ints, Ints]:
        """What of each row its `holder`, a rank or `ABSENT`, does not hold: (row, start, stop)."""
        beyond = interval.subtract(start, stop, *self.region())
        row, tensor, low, high = interval.intersect(start, stop, self.start, self.stop)
        others = (holder[row] < self.first[tensor]) | (holder[row] > self.last[tensor])  # ABSENT is below every rank
        parts = [beyond, (row[others], low[others], high[others])]
        rows, low, high = (np.concatenate(column) for column in zip(*parts, strict=True))
        return rows, low, high

    def place(self, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Where runs lie in the buffers of the ranks that hold them: (row, start, stop, buffer, offset).

        rank: one per row; each must hold its row.
        """
        row, tensor, low, high = interval.intersect(start, stop, self.start, self.stop)
        return row, low, high, self.buffer[tensor], self._offset(tensor, rank[row]) + low - self.start[tensor]

    def _offset(self, tensor: Ints, rank: Ints) -> Ints:
        """Where tensors begin in the buffers of ranks that hold them: behind the first tensor that reaches the rank."""
        return self.at[tensor] - self.opening[np.searchsorted(self.reach, self.buffer[tensor] * self.ranks + rank)]
