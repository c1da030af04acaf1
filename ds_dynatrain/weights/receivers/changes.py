"""Deltas: the elements of a message whose bits have changed, each as two bytes for its place, and its value."""

from __future__ import annotations

import torch

from ds_dynatrain.errors import TransferError

PAGE = 1 << 16
"""Elements among which two bytes tell a place."""
WHOLE = -1
"""Number of changed elements that stands for all elements of a message."""


def bits(flat: torch.Tensor) -> torch.Tensor:
    """Return a view of flat values as integers of the same size, to compare them bit by bit."""
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def packed_places(places: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ascending places among `numel` elements as bytes: how many lie in each page, then two bytes for each."""
    counts = torch.bincount(places // PAGE, minlength=-(-numel // PAGE)).to(torch.int32)
    return torch.cat([counts.view(torch.uint8), (places % PAGE).to(torch.int32).to(torch.int16).view(torch.uint8)])


def packed_bytes(count: int, numel: int) -> int:
    """Return the size of what `packed_places` makes of `count` places."""
    return 4 * -(-numel // PAGE) + 2 * count


def unpacked_places(data: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the places that `packed_places` made the bytes of. Raise TransferError if they cannot be its result."""
    counts, places = data.split([4 * -(-numel // PAGE), len(data) - 4 * -(-numel // PAGE)])
    each = counts.clone().view(torch.int32).long()
    inside = places.clone().view(torch.int16).long() & (PAGE - 1)
    if (each < 0).any() or int(each.sum()) != len(inside):
        raise TransferError(f"{len(inside)} changes were announced, and {int(each.sum())} are listed")
    found: torch.Tensor = torch.arange(len(each)).repeat_interleave(each) * PAGE + inside
    if len(found) and (int(found[-1]) >= numel or (found.diff() <= 0).any()):
        raise TransferError(f"changes of {numel} elements are out of order, or lie behind the last")
    return found
