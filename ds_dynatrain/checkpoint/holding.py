"""Copies of what is to be written, in host memory that is used again and again: touching new memory costs more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ds_dynatrain.checkpoint.writing import Share
from ds_dynatrain.transfer import allocate

ALIGN = 64
"""Of each copy, in bytes."""
Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class HostMemory:
    """As much as the last copies needed."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copies(self, shares: Sequence[Share]) -> list[Share]:
        """The same shares with values that nobody else changes, until the next call."""
        wanted: dict[Place, torch.Tensor] = {}
        for share in shares:
            for values in (share.matrix, *([] if share.master is None else [share.master])):
                wanted.setdefault(_place(values), values)
        need = sum(_padded(values) for values in wanted.values())
        if len(self._room) < need:
            self._room = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._room = allocate(need, torch.uint8)
        at, found = 0, dict[Place, torch.Tensor]()
        for place, values in wanted.items():
            held = self._room[at : at + _bytes(values)].view(values.dtype).view(values.shape)
            held.copy_(values.detach())
            found[place], at = held, at + _padded(values)
        return [
            replace(
                share,
                matrix=found[_place(share.matrix)],
                master=None if share.master is None else found[_place(share.master)],
            )
            for share in shares
        ]


def _place(values: torch.Tensor) -> Place:
    return values.data_ptr(), values.dtype, values.shape, values.stride()


def _padded(values: torch.Tensor) -> int:
    return -(-_bytes(values) // ALIGN) * ALIGN


def _bytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()
