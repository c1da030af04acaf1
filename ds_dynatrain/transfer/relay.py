"""The same tensors from one member to many: down a binary tree, so that no member sends more than two copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_dynatrain.transfer.transport import Transport

RELAY_TAG = 2
RELAY_BYTES = 16 << 20
"""A longer tensor is passed on in parts of this size, so that all levels of the tree are busy at once."""


def send_down(
    tree: Sequence[int], mine: int, tensors: Sequence[torch.Tensor], transport: Transport, deadline: float
) -> None:
    """Fill `tensors` on every member of `tree` with those of its first one; each member calls it.

    tree: members; the one at place i sends to those at places 2i + 1 and 2i + 2. deadline: by `time.monotonic()`.
    Errors are those of `Handle.wait`.
    """
    place = tree.index(mine)
    below = tree[2 * place + 1 : 2 * place + 3]
    parts = [part for tensor in tensors if tensor.numel() for part in _parts(tensor)]
    coming = [transport.receive(part, tree[(place - 1) // 2], RELAY_TAG) for part in parts] if place else []
    sent = []
    for number, part in enumerate(parts):
        if place:
            coming[number].wait(deadline)
        sent += [transport.send(part, member, RELAY_TAG) for member in below]
    for handle in sent:
        handle.wait(deadline)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.contiguous().view(-1), max(1, RELAY_BYTES // tensor.element_size()))
