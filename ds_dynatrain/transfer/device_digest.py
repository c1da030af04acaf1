"""Digests of values on an accelerator: one kernel launch for all runs of a state kind, each byte read once.

A program of the kernel owns one slice of the positions in a block (see `digest` for the formula) and walks over the
blocks of its run: it adds up value * factor, and multiplies by the slice's weights once at the end. So the weights are
read once per program and not once per byte. Which program does what is arithmetic on the host (`programs`). Where
there is no Triton, torch's own arithmetic gives the same number, some ten passes and one launch per run slower.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_dynatrain.transfer.weighing import BLOCK_BYTES, BLOCK_UNITS, UInt64s, factors, tables

Int64s = npt.NDArray[np.int64]

WORD_BYTES = 4
SLICES = 16
"""Of a block, each a program's."""
WALK = 32
"""Most blocks that one program walks over: few enough that there are programs for all processors."""
DEVICE_BLOCKS = 256
"""Blocks weighed at once by torch's arithmetic (32 MiB of values, about three times that in temporaries)."""
_MASK = (1 << 64) - 1


class Runs(NamedTuple):
    """Runs of bytes on a device, one per row: the address of the first, where it begins in its logical tensor, how many
    they are, and the number of the tensor.
    """

    address: Int64s
    begin: Int64s
    length: Int64s
    tensor: Int64s

    @property
    def width(self) -> int:
        """Bytes that are read at once: the largest of 4, 2 and 1 that divides every address, begin and length."""
        return gcd(WORD_BYTES, *(int(np.gcd.reduce(column)) for column in self[:3]))


class Programs(NamedTuple):
    """What each program of the kernel does: its run, its slice of a block, the first block and the number of blocks."""

    run: Int64s
    slice: Int64s
    first: Int64s
    number: Int64s


def programs(runs: Runs) -> Programs:
    """Programs that together read every byte of the runs once.

    A run is cut into spans of at most WALK blocks, and a span into those slices in which it has bytes: all of them, but
    where it lies within one block.
    """
    first, last = runs.begin // BLOCK_BYTES, (runs.begin + runs.length - 1) // BLOCK_BYTES
    spans = np.where(runs.length > 0, (last - first) // WALK + 1, 0)
    run = np.repeat(np.arange(len(spans)), spans)
    begin = first[run] + WALK * _count_up(spans)
    number = np.minimum(WALK, last[run] + 1 - begin)
    low, high = _slice_of(np.maximum(runs.begin[run], begin * BLOCK_BYTES)), np.full(len(run), SLICES - 1)
    ends = np.minimum((runs.begin + runs.length)[run], (begin + number) * BLOCK_BYTES)
    alone = number == 1
    low, high = np.where(alone, low, 0), np.where(alone, _slice_of(ends - 1), high)
    slices = high - low + 1
    row = np.repeat(np.arange(len(run)), slices)
    return Programs(run[row], low[row] + _count_up(slices), begin[row], number[row])


def digests(runs: Runs, tensors: int, device: torch.device) -> UInt64s:
    """Digest of each of `tensors` tensors from the runs, which lie on `device`, by the kernel; needs Triton."""
    from ds_dynatrain.transfer.digest_kernel import launch

    sums = torch.zeros(tensors, dtype=torch.int64, device=device)
    if runs.length.any():
        launch(runs, programs(runs), weights(device), sums)
    return sums.cpu().numpy().view(np.uint64)


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel can run there."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def weights(device: torch.device) -> torch.Tensor:
    """Weight of each 32-bit word of a block, without the block's factor: int64, two per unit (see `digest`)."""
    low, high = tables()
    both = np.stack([low, high + (low << np.uint64(32))], axis=1).reshape(-1)
    return torch.from_numpy(both.view(np.int64)).to(device)


def by_arithmetic(data: torch.Tensor, begin: int) -> int:
    """Digest of bytes (uint8, 1-D) that begin at byte `begin` of their tensor, from torch's int64 arithmetic."""
    low, high = (torch.from_numpy(table.view(np.int64).copy()).to(data.device) for table in tables())
    end, total, step = begin + data.numel(), 0, DEVICE_BLOCKS * BLOCK_BYTES
    for span in range(begin // BLOCK_BYTES * BLOCK_BYTES, end, step):
        from_byte, to_byte = max(begin, span), min(end, span + step)
        blocks = (to_byte - span + BLOCK_BYTES - 1) // BLOCK_BYTES
        padded = torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        padded[from_byte - span : to_byte - span] = data[from_byte - begin : to_byte - begin]
        units = padded.view(torch.int64).view(blocks, BLOCK_UNITS)
        rows = (units * low).sum(1) + (((units >> 32) & 0xFFFFFFFF) * high).sum(1)
        factor = torch.from_numpy(factors(span // BLOCK_BYTES, blocks).view(np.int64)).to(data.device)
        total += int((rows * factor).sum().item())
    return total & _MASK


def _slice_of(byte: Int64s) -> Int64s:
    """The slice of its block in which a byte of a tensor lies."""
    return byte % BLOCK_BYTES // (BLOCK_BYTES // SLICES)


def _count_up(numbers: Int64s) -> Int64s:
    """0 ... n - 1 for each n, one after another."""
    return np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
