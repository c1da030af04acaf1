"""A digest of elements and their logical positions that adds up over disjoint pieces, whatever the layout.

A logical tensor is read as its row-major bytes, padded with zeros to whole 32-bit words (little endian). Its digest
is

    sum over words of  word[j] * weight[j]   mod 2^64,      weight[j] = table[j mod T] * factor[j div T]

so a piece that starts or ends inside a word adds the bytes it has, and any split of a tensor adds up to the same
number. Every weight is odd and looks random (splitmix64), thus one changed word always changes the digest, and a
swap, a shift or a pair of sign flips does so with probability 1 - 2^-32 or better. Words have 32 bits because with
64-bit words the sign bit of every second float has weight 2^63, and two flips cancel.

Speed comes from two words at once: for v = low + 2^32 * high,  v * a + (v >> 32) * b  weighs `low` by a and `high` by
b + 2^32 * a; both are odd when a and b are. The tables (2 x 128 KiB) stay in the second-level cache. The sum itself is
computed in `weighing`. It protects against mistakes, not against an adversary.
"""

from __future__ import annotations

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer import weighing
from ds_dynatrain.transfer.device_digest import DeviceTable, Runs, by_arithmetic, has_kernel
from ds_dynatrain.transfer.weighing import Bytes, summer

_MASK = (1 << 64) - 1


def digest(values: torch.Tensor, start: int = 0) -> int:
    """Digest, in [0, 2^64), of the elements start ... start + len(values) - 1 of one logical tensor.

    `values` is 1-D and contiguous, of any dtype. The number is the same on every device. Digests of disjoint parts of
    a tensor add up modulo 2^64 to the digest of the whole.
    """
    check_flat(values)
    if values.device.type != "cpu":
        return digest_on_device(values, start)
    data = bytes_of(values)
    return summer().sum(data, weighing.Runs(0, 0, 1, len(data), start * values.element_size(), 0)) & _MASK


def digest_on_device(values: torch.Tensor, start: int = 0) -> int:
    """The number that `digest` gives, computed on the device of the values."""
    check_flat(values)
    if values.numel() == 0:
        return 0
    size, data = values.element_size(), values.detach().view(torch.uint8)
    if not has_kernel(values.device):
        return by_arithmetic(data, start * size)
    run = Runs(*(np.array([value]) for value in (0, start * size, data.numel(), 0)))
    return int(DeviceTable.of(run, np.array([0]), values.device).digests([data.data_ptr()], 1)[0])


def check_flat(values: torch.Tensor) -> None:
    """TransferError unless digests can be taken of it as it lies."""
    if values.dim() != 1 or not values.is_contiguous():
        shape, stride = tuple(values.shape), values.stride()
        raise TransferError(f"digests are of 1-D contiguous values, got shape {shape}, strides {stride}: flatten first")


def bytes_of(values: torch.Tensor) -> Bytes:
    """The memory of values on the CPU."""
    flat: Bytes = values.detach().view(torch.uint8).numpy()
    return flat
