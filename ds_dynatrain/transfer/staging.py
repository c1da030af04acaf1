"""Host memory for messages that are packed, or that an accelerator's bytes pass through."""

from __future__ import annotations

from contextlib import suppress

import torch

from ds_dynatrain.transfer.prefault import allocate, prefault

SLOTS = 4
"""Staged messages under way per direction: enough that packing, wire and unpacking overlap."""


class Staging:
    """Slots of `chunk` bytes, 2 * SLOTS at most for each exchange under way, used again and again.

    chunk: bytes of a slot. is_pinned: whether they are page-locked, which lets an accelerator copy by itself, four to
    seven times as fast. peak: the most bytes that were in use at once.
    """

    def __init__(self, chunk: int, is_pinned: bool = False) -> None:
        self.chunk, self.is_pinned = chunk, is_pinned
        self._free, self._used, self.peak = list[torch.Tensor](), 0, 0

    def reserve(self, slots: int) -> None:
        """Have so many slots, touched."""
        while len(self._free) < slots:
            slot = self._slot()
            if not self.is_pinned:  # pages that are locked are there
                prefault(slot)
            self._free.append(slot)

    def take(self, nbytes: int) -> torch.Tensor:
        """A slot's first `nbytes` bytes."""
        slot = self._free.pop() if self._free else self._slot()
        self._used += nbytes
        self.peak = max(self.peak, self._used)
        return slot[:nbytes]

    def give(self, staged: torch.Tensor) -> None:
        """Return what `take` gave."""
        self._used -= staged.numel()
        self._free.append(staged.as_strided((self.chunk,), (1,)))

    def _slot(self) -> torch.Tensor:
        """New memory; not pinned where the system locks no more, or the accelerator has no such memory."""
        if self.is_pinned:
            with suppress(RuntimeError):
                return torch.empty(self.chunk, dtype=torch.uint8, pin_memory=True)
            self.is_pinned = False
        return allocate(self.chunk, torch.uint8)
