"""The copies of state that a process keeps, in two sets, one of which is always complete.

While one set is written, the other set keeps the copies that are known to be complete on all members. The memory of a
set is reused, because touching new memory costs more than copying into it.
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
    """Host memory for one copy, which is used again for later copies. It never shrinks."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Number of bytes of host memory that are allocated for copies."""
        return self._memory.numel()

    def fit(self, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` of the memory as a uint8 tensor; allocate more memory if necessary. Any earlier
        content is lost.

        Raises MemoryError if not enough memory is available.
        """
        if self.nbytes < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before allocating the new
            if nbytes > (free := available_bytes()):
                raise MemoryError(f"a copy takes {nbytes} bytes, and {free} are available")
            self._memory = allocate(nbytes, torch.uint8)
            prefault(self._memory)
        return self._memory[:nbytes]


class _Place:
    """One of the two sets of copies: memory for the copy of the process's own rank and of each ward, and the complete
    copies.

    A ward is another rank whose copies this process keeps.
    """

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.own = Room()
        self.wards: list[Room] = []
        self.copies: dict[int, Copy] = {}


class Kept:
    """The copies that one process keeps of its own rank and of its wards, taken at two points in training.

    A ward is another rank whose copies this process keeps. Copies are kept when the world changes: those of an older
    world stay until those of the current world are complete on all members.

    frozen: the frozen weights of this rank that other ranks have as well. They are the same at every step, so they are
        kept without being copied.
    frozen_of: the layout and rank in which the frozen weights were held.
    since: the `Mark.stretch` of the newest load of a state. Older copies do not count.
    """

    def __init__(self) -> None:
        self.frozen: Buffers = {}
        self.frozen_of: tuple[Layout, int] | None = None
        self.since: tuple[int, ...] = ()
        self._places = _Place(), _Place()
        self.whole: Mark | None = None
        """Mark of the newest copies that are known to be complete on all members. The other set of copies may be
        overwritten."""
        self._open: _Place | None = None
        self._lock = threading.Lock()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Return all complete copies that this process has, of its own rank and of other ranks, newest first."""
        with self._lock:
            found = [copy for place in self._places for copy in place.copies.values()]
        found = [copy for copy in found if copy.mark.stretch >= self.since]
        return sorted(found, key=lambda copy: (copy.mark.moment, -copy.rank), reverse=True)

    def find(self, mark: Mark, rank: int) -> Copy | None:
        """Return the copy of a rank that was taken at a given point in training; None if this process does not have
        it."""
        return next((copy for copy in self.copies() if (copy.mark, copy.rank) == (mark, rank)), None)

    @property
    def nbytes(self) -> int:
        """Number of bytes of host memory that all copies take."""
        return sum(room.nbytes for place in self._places for room in (place.own, *place.wards))

    # ---- writing -----------------------------------------------------------------------------------------------------

    def begin(self, mark: Mark, wards: int) -> tuple[Room, list[Room]]:
        """Return memory for new copies: for one of this process's own rank, and for those of other ranks. It replaces
        the copies that are no longer needed.

        mark: the point in training at which the new copies are taken.
        wards: the number of other ranks whose copies this process keeps.
        """
        with self._lock:
            place = next(each for each in self._places if each.mark is None or each.mark != self.whole)
            place.copies, place.mark = {}, mark
            place.wards += [Room() for _ in range(wards - len(place.wards))]
            del place.wards[wards:]
            self._open = place
            return place.own, place.wards

    def add(self, copy: Copy) -> None:
        """Add a copy that this process has received or taken completely. Ignored unless it has the mark given to the
        last `begin`."""
        with self._lock:
            if self._open is not None and self._open.mark == copy.mark:
                self._open.copies[copy.rank] = copy

    def mark_whole(self, mark: Mark) -> None:
        """Record that all members have their copies of a point in training, so that other copies are overwritten first.
        Does nothing if this process has no copy of that point."""
        if any(copy.mark == mark for copy in self.copies()):
            self.whole = mark

    def void_before(self, stretch: tuple[int, ...]) -> None:
        """Ignore all copies, present and future, that were taken before a state, such as a checkpoint, was loaded.

        stretch: the `Mark.stretch` of copies taken after that; copies with a smaller one are ignored.
        """
        self.since = max(self.since, stretch)

    def forget(self) -> None:
        """Discard all copies, including one that is being taken. Their memory stays allocated."""
        with self._lock:
            for place in self._places:
                place.copies, place.mark = {}, None
            self._open = self.whole = None
