"""Deltas: the changed elements of a message, each in about one byte for its position and one for the change.

Between two updates with a small learning rate, an element changes by a few units in the last place, if at all. If its
bits are read as an integer, this integer changes by a small number, and adding that number restores the value exactly.
Larger changes are sent as whole values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_dynatrain.errors import TransferError

SKIP = 255
"""Byte for 255 unchanged elements. Any other byte N stands for N unchanged elements and the changed one after them."""
LARGE = -128
"""Value that marks a change too large for one byte; the whole element is sent instead."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeltaCounts(NamedTuple):
    """The sizes of a delta, which its receiver must know first.

    places: number of bytes with positions; `WHOLE` if all elements of the message follow, changed or not.
    changes: number of changed elements, and of bytes with small changes.
    large: number of elements that are sent whole, because their change is too large for one byte.
    """

    places: int
    changes: int
    large: int

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Return the size in bytes of the delta for a message of `numel` elements of `itemsize` bytes each."""
        return numel * itemsize if self.places == WHOLE else self.places + self.changes + self.large * itemsize


WHOLE = -1
"""Value of `DeltaCounts.places` which says that all elements follow."""
COUNTS_BYTES = 24


def bits(flat: torch.Tensor) -> torch.Tensor:
    """Return a view of flat values as integers of the same size."""
    return flat.view(_INTEGERS[flat.element_size()])


def packed(values: torch.Tensor, before: torch.Tensor) -> tuple[DeltaCounts, torch.Tensor]:
    """Return the delta from the values `before` to `values`, or `values` themselves if they take fewer bytes."""
    change = bits(values) - bits(before)  # integers wrap around on overflow
    at = change.nonzero().view(-1)
    skipped = at.diff(prepend=torch.tensor([-1])) - 1
    ends = (skipped // SKIP + 1).cumsum(0)
    places = torch.full((int(ends[-1]) if len(at) else 0,), SKIP, dtype=torch.uint8)
    places[ends - 1] = (skipped % SKIP).to(torch.uint8)
    change = change[at]
    is_large = (change <= LARGE) | (change > -LARGE - 1)
    small = change.masked_fill(is_large, LARGE).to(torch.int8)
    counts = DeltaCounts(len(places), len(at), int(is_large.sum()))
    if counts.nbytes(len(values), values.element_size()) >= values.nbytes:
        return DeltaCounts(WHOLE, 0, 0), values.view(torch.uint8)
    return counts, torch.cat([places, small.view(torch.uint8), values[at[is_large]].view(torch.uint8)])


def check(counts: DeltaCounts, numel: int) -> DeltaCounts:
    """Return `counts`, which a trainer has announced, unchanged. Raises TransferError if no delta of `numel` elements
    has such counts.
    """
    changes, large = counts.changes, counts.large
    if counts.places != WHOLE and not (
        0 <= large <= changes <= min(counts.places, numel) and counts.places <= 2 * numel
    ):
        raise TransferError(f"{counts} cannot describe changes of {numel} elements")
    return counts


def apply(flat: torch.Tensor, data: torch.Tensor, counts: DeltaCounts) -> None:
    """Apply the bytes that `packed` returned to a message's values, which must be in host memory.

    Raises TransferError if the bytes are not such a delta.
    """
    places, small, large = data.split([counts.places, counts.changes, len(data) - counts.places - counts.changes])
    ends = (places != SKIP).nonzero().view(-1)
    at = places.long().cumsum(0)[ends] + torch.arange(len(ends))
    change = small.view(torch.int8)
    is_large = change == LARGE
    if len(at) != counts.changes or (len(at) and int(at[-1]) >= len(flat)) or int(is_large.sum()) != counts.large:
        raise TransferError(f"a delta of {len(flat)} elements has {len(at)} places, and not what {counts} announced")
    bits(flat)[at] += change.to(bits(flat).dtype)
    flat[at[is_large]] = large.clone().view(flat.dtype)
