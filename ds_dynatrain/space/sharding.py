"""A sharding: how one layout holds one state kind, as answers that hold for every rank at once.

Three ways of holding give them: equal parts or all of it (`even`), whole tensors on several ranks (`overlapping`), and
one of these for each group of ranks that other axes have dealt the same to (`grouped`). Runs are given and answered as
arrays: a *row* is one of the runs asked about, and every answer names the row that it is of.
"""

from __future__ import annotations

from typing import Protocol

from ds_dynatrain.space.pieces import BufferId, Pieces
from ds_dynatrain.space.tensor import Ints

ABSENT = -1
"""In place of a rank: nobody."""


class Sharding(Protocol):
    """Who holds which element of a kind, and where."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    @property
    def buffers(self) -> tuple[BufferId, ...]:
        """The buffers that a rank may have; pieces and places name them by their number here."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of it."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds an element."""

    @property
    def shared(self) -> list[tuple[Ints, Ints, Ints]] | None:
        """(ranks, start, stop) of what several ranks hold alike, if that is all there is; None if it is not."""

    def holding(self, rank: int) -> Pieces:
        """What a rank holds."""

    def owned(self, rank: int) -> Pieces:
        """The part of `holding` that the rank owns: over all ranks these tile the kind, whoever else holds it."""

    def region(self) -> tuple[Ints, Ints]:
        """The runs that the ranks hold together, touching ones joined."""

    def owners(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut runs by the one rank that owns each element: (row, start, stop, rank); what nobody holds is left out."""

    def holders(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Every rank that holds a part of a run: (row, start, stop, rank)."""

    def lacking(self, start: Ints, stop: Ints, holder: Ints) -> tuple[Ints, Ints, Ints]:
        """What of each row its `holder`, a rank or `ABSENT`, does not hold: (row, start, stop)."""

    def place(self, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Where runs lie in the buffers of the ranks that hold them: (row, start, stop, buffer, offset).

        rank: one per row; each must hold its row. Rows are cut where the buffer or the step in it changes.
        """
