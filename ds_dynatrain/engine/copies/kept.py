"""The copies that a process has, in two places, so that there is a whole one at every moment.

While one place is written, the other one holds the moment that all members have whole. The memory of a place is used
again: touching new memory costs more than what is copied there.
"""

from __future__ import annotations

import threading

import torch

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.engine.copies.copy import Copy
from ds_dynatrain.engine.copies.whole import Mark
from ds_dynatrain.engine.feasible import available_bytes
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import allocate, prefault


class Room:
    """Host memory for one copy at a time, as much as the largest one needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._memory.numel()

    def fit(self, nbytes: int) -> torch.Tensor:
        """Return its first bytes, as uint8; what they held is gone. MemoryError if there is not so much."""
        if self.nbytes < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            if nbytes > (free := available_bytes()):
                raise MemoryError(f"a copy takes {nbytes} bytes, and {free} are available")
            self._memory = allocate(nbytes, torch.uint8)
            prefault(self._memory)
        return self._memory[:nbytes]


class _Place:
    """A moment: a room for the own copy, one for each ward's, and the copies that are whole."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.own = Room()
        self.wards: list[Room] = []
        self.copies: dict[int, Copy] = {}


class Kept:
    """The copies of one process: of its own rank and of its wards, the last two moments each.

    It outlives worlds: what is of an older one stays until what is of the present one is whole on all.

    frozen: the rank's own frozen weights where others have them, too, which are the same at every step: not copied, but
    held on to, as they lay in `frozen_of`, (layout, rank).

    since: the stretch of training in which the newest load was (`Mark.stretch`); copies of older ones count no more.
    """

    def __init__(self) -> None:
        self.frozen: Buffers = {}
        self.frozen_of: tuple[Layout, int] | None = None
        self.since: tuple[int, ...] = ()
        self._places = _Place(), _Place()
        self._whole: Mark | None = None
        self._open: _Place | None = None
        self._lock = threading.Lock()

    # ---- what is there -----------------------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Return all copies that this process has whole, of itself and of its wards; the newest first."""
        with self._lock:
            found = [copy for place in self._places for copy in place.copies.values()]
        found = [copy for copy in found if copy.mark.stretch >= self.since]
        return sorted(found, key=lambda copy: (copy.mark.moment, -copy.rank), reverse=True)

    def find(self, mark: Mark, rank: int) -> Copy | None:
        """Return the copy of a rank at a moment, if it is here."""
        return next((copy for copy in self.copies() if (copy.mark, copy.rank) == (mark, rank)), None)

    @property
    def whole(self) -> Mark | None:
        """The newest moment of which all members are known to have all copies."""
        return self._whole

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return sum(room.nbytes for place in self._places for room in (place.own, *place.wards))

    # ---- writing -----------------------------------------------------------------------------------------------------

    def begin(self, mark: Mark, wards: int) -> tuple[Room, list[Room]]:
        """Return rooms for the own copy and those of so many wards, apart from the moment that is whole on all."""
        with self._lock:
            place = next(each for each in self._places if each.mark is None or each.mark != self._whole)
            place.copies, place.mark = {}, mark
            place.wards += [Room() for _ in range(wards - len(place.wards))]
            del place.wards[wards:]
            self._open = place
            return place.own, place.wards

    def add(self, copy: Copy) -> None:
        """Add a copy that is whole here; it counts if it is of the moment that was begun last."""
        with self._lock:
            if self._open is not None and self._open.mark == copy.mark:
                self._open.copies[copy.rank] = copy

    def is_whole(self, mark: Mark) -> None:
        """Note that all members have all copies of a moment: the other place may be written from here on."""
        self._whole = mark

    def void_before(self, stretch: tuple[int, ...]) -> None:
        """Void copies of stretches before this one, whenever they come: a state was loaded in it."""
        self.since = max(self.since, stretch)

    def forget(self) -> None:
        """Let no copy count any more, nor one that is on its way. Their memory stays."""
        with self._lock:
            for place in self._places:
                place.copies, place.mark = {}, None
            self._open = self._whole = None
