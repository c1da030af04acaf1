"""The copies that a process has, in two places, so that there is a whole one at every moment.

While one place is written, the other one holds the moment that all members have whole. The memory of a place is used
again: touching new memory costs more than copying into it.
"""

from __future__ import annotations

import threading

import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.engine.copies.copy import Copy
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.reshard.feasible import available_bytes
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import allocate, prefault


class Room:
    """Host memory for one copy at a time, as much as the largest one needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the room takes."""
        return self._memory.numel()

    def fit(self, nbytes: int) -> torch.Tensor:
        """Return its first bytes, as uint8; their old content is lost. Raise MemoryError if there is not enough."""
        if self.nbytes < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before allocating the new
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

    It outlives worlds: copies of an older one stay until those of the present one are whole on all members.

    frozen: the rank's own frozen weights that other ranks have, too. They are the same at every step, so they are not
    copied, but kept as they lay in `frozen_of`, (layout, rank).

    since: the stretch of training with the newest load (`Mark.stretch`); copies of older ones count no more.
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
        """Return the copy of a rank at a moment, or None if this process does not have it."""
        return next((copy for copy in self.copies() if (copy.mark, copy.rank) == (mark, rank)), None)

    @property
    def whole(self) -> Mark | None:
        """Newest moment of which all members are known to have all copies."""
        return self._whole

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return sum(room.nbytes for place in self._places for room in (place.own, *place.wards))

    # ---- writing -----------------------------------------------------------------------------------------------------

    def begin(self, mark: Mark, wards: int) -> tuple[Room, list[Room]]:
        """Return rooms for the own copy and those of `wards` wards, outside the moment that is whole on all members."""
        with self._lock:
            place = next(each for each in self._places if each.mark is None or each.mark != self._whole)
            place.copies, place.mark = {}, mark
            place.wards += [Room() for _ in range(wards - len(place.wards))]
            del place.wards[wards:]
            self._open = place
            return place.own, place.wards

    def add(self, copy: Copy) -> None:
        """Add a copy that is whole in this process; it counts if it is of the moment that was begun last."""
        with self._lock:
            if self._open is not None and self._open.mark == copy.mark:
                self._open.copies[copy.rank] = copy

    def is_whole(self, mark: Mark) -> None:
        """Note that all members have all copies of a moment: the other place may be written from then on."""
        self._whole = mark

    def void_before(self, stretch: tuple[int, ...]) -> None:
        """Void copies of stretches before this one, also copies that are added later: a state was loaded in it."""
        self.since = max(self.since, stretch)

    def forget(self) -> None:
        """Void all copies, also one that is being taken. Their memory stays."""
        with self._lock:
            for place in self._places:
                place.copies, place.mark = {}, None
            self._open = self._whole = None
