"""Host memory for messages that are packed, or that an accelerator's bytes pass through."""

from __future__ import annotations

import torch

from ds_dynatrain.transfer.prefault import allocate, prefault

SLOTS = 4
"""Staged messages under way per direction: enough that packing, wire and unpacking overlap."""


class Staging:
    """Slots of `chunk` bytes, 2 * SLOTS at most for each exchange under way, used again and again.

    chunk: bytes of a slot. peak: the most bytes that were in use at once.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk, self._free, self._used = chunk, list[torch.Tensor](), 0
        self.peak = 0

    def reserve(self, slots: int) -> None:
        """Have so many slots, touched."""
        while len(self._free) < slots:
            slot = allocate(self.chunk, torch.uint8)
            prefault(slot)
            self._free.append(slot)

    def take(self, nbytes: int) -> torch.Tensor:
        """A slot's first `nbytes` bytes."""
        slot = self._free.pop() if self._free else allocate(self.chunk, torch.uint8)
        self._used += nbytes
        self.peak = max(self.peak, self._used)
        return slot[:nbytes]

    def give(self, staged: torch.Tensor) -> None:
        """Return what `take` gave."""
        self._used -= staged.numel()
        self._free.append(staged.as_strided((self.chunk,), (1,)))
