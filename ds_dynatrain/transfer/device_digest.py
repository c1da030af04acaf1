"""Digests of values on an accelerator. One kernel launch handles all byte ranges (runs) of a state kind, and reads each
byte once.

A program of the kernel handles one slice of the positions in a block (see `digests` for the formula) and iterates over
the blocks of its run: it sums value * factor, and multiplies by the slice's weights once at the end. Weights are thus
read once per program and not once per byte. The host assigns the work of the programs (`programs`), optionally before
the addresses of the buffers are known (`DeviceTable`). Without Triton, torch's arithmetic gives the same number, but
needs about ten passes and separate launches for each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from ds_dynatrain.space.interval import Ints, expand
from ds_dynatrain.transfer.weighing import BLOCK_BYTES, BLOCK_UNITS, SLICES, WORD_BYTES, UInt64s, factors, tables

MANY_RUNS = 4096
"""Minimum number of byte ranges for which a table is kept on the device. A smaller table stays on the host, because
sending it takes less time than updating it on the device."""
WALK = 32
"""Maximum number of blocks per kernel program; small enough that there are programs for all processors of a device."""
DEVICE_BLOCKS = 256
"""Number of blocks that torch's arithmetic processes at once (32 MiB of values, and about three times as much in
temporaries)."""
_MASK = (1 << 64) - 1


class DeviceRuns(NamedTuple):
    """Ranges of bytes (runs) on a device, as arrays with one entry per range.

    address: address of the first byte.
    begin: offset of the first byte in its logical tensor.
    length: number of bytes.
    tensor: number of the tensor.
    """

    address: Ints
    begin: Ints
    length: Ints
    tensor: Ints


class Programs(NamedTuple):
    """The work of the kernel's programs, as arrays with one entry per program.

    run: the index of the byte range that the program reads.
    slice: the slice of each block that the program reads.
    first: the first block that the program reads.
    number: the number of blocks that the program reads.
    """

    run: Ints
    slice: Ints
    first: Ints
    number: Ints


def programs(runs: DeviceRuns) -> Programs:
    """Divide byte ranges (runs) among kernel programs that together read every byte once.

    A run is cut into spans of at most WALK blocks. A span within one block gets one program for each slice of the block
    that contains bytes of the run. A longer span gets one program for every slice.
    """
    end = runs.begin + runs.length
    first, last = runs.begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
    run, nth = expand(np.where(runs.length > 0, (last - first) // WALK + 1, 0))
    begin = first[run] + WALK * nth
    number = np.minimum(WALK, last[run] + 1 - begin)
    alone = number == 1
    low = np.where(alone, _slice_of(np.maximum(runs.begin[run], begin * BLOCK_BYTES)), 0)
    high = np.where(alone, _slice_of(np.minimum(end[run], (begin + 1) * BLOCK_BYTES) - 1), SLICES - 1)
    row, nth = expand(high - low + 1)
    return Programs(run[row], low[row] + nth, begin[row], number[row])


@dataclass(frozen=True)
class DeviceTable:
    """Byte ranges (runs) in the buffers of one device, and the kernel programs that digest them. The table does not
    depend on the buffers' addresses.

    device: the device of the buffers.
    columns: the fields of `DeviceRuns` as rows of int64, with addresses relative to the buffers.
    source: the buffer number of each run.
    programs: the fields of `Programs` as rows of int32.
    ends: the distinct pairs of a buffer number and the remainder of a run's relative address by WORD_BYTES, as two
        arrays.
    width: the number of bytes (4, 2 or 1) that a program may read at once, as far as offsets and lengths permit; the
        buffers' addresses may reduce it.

    The tensors `columns`, `source` and `programs` are on the host or on the device, whichever is faster.
    """

    device: torch.device
    columns: torch.Tensor
    source: torch.Tensor
    programs: torch.Tensor
    ends: tuple[Ints, Ints]
    width: int

    @staticmethod
    def of(runs: DeviceRuns, source: Ints, device: torch.device) -> DeviceTable:
        """Build the table for runs whose addresses are relative to their buffers.

        source: the buffer number of each run. A large table is placed on the device.
        """
        where = device if len(source) >= MANY_RUNS else torch.device("cpu")
        done = np.stack([column.astype(np.int32) for column in programs(runs)])  # enough for tensors of 256 TiB
        ends = np.flatnonzero(np.bincount(source * WORD_BYTES + runs.address % WORD_BYTES))
        return DeviceTable(
            device,
            torch.from_numpy(np.stack(runs)).to(where),
            torch.from_numpy(source.astype(np.int32)).to(where),
            torch.from_numpy(done).to(where),
            (ends // WORD_BYTES, ends % WORD_BYTES),
            _width(runs.begin, runs.length),
        )

    @property
    def nbytes(self) -> int:
        """Memory that the table uses, in bytes."""
        return sum(each.nbytes for each in (self.columns, self.source, self.programs))

    def digests(self, data: Sequence[torch.Tensor], tensors: int) -> UInt64s:
        """Return the digest of each tensor. Requires Triton.

        data: the buffers.
        tensors: the number of tensors.
        """
        if not self.programs.shape[1]:
            return np.zeros(tensors, dtype=np.uint64)
        from ds_dynatrain.transfer.digest_kernel import launch

        buffer, end = self.ends
        base = torch.tensor([values.data_ptr() for values in data], dtype=torch.int64)
        columns = self.columns.clone()
        columns[0] += base.to(columns.device)[self.source]
        width = gcd(self.width, _width(base.numpy()[buffer] + end))
        sums = torch.zeros(tensors, dtype=torch.int64, device=self.device)
        done = self.programs.to(torch.int64)
        launch(columns.to(self.device), done.to(self.device), width, weights(self.device), sums)
        return sums.cpu().numpy().view(np.uint64)


@cache
def has_kernel(device: torch.device) -> bool:
    """Return whether the kernel can run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def weights(device: torch.device) -> torch.Tensor:
    """Return the weight of each 32-bit word of a block as int64. The factor of the block is not included (see
    `digests`)."""
    low, high = tables()
    both = np.stack([low, high + (low << np.uint64(32))], axis=1).reshape(-1)
    return torch.from_numpy(both.view(np.int64)).to(device)


def by_arithmetic(data: torch.Tensor, begin: int) -> int:
    """Return the digest of bytes on any device, computed by torch's int64 arithmetic.

    data: the bytes, as a 1-D uint8 tensor.
    begin: offset of the first byte in its logical tensor.
    """
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


def _slice_of(byte: Ints) -> Ints:
    """Return the slice (a fixed part of each block) to which a byte of a tensor belongs.

    byte: the offset of the byte in the tensor.
    """
    return byte % BLOCK_BYTES // (BLOCK_BYTES // SLICES)


def _width(*columns: Ints) -> int:
    """Return the largest of 4, 2 and 1 that divides all the given numbers."""
    return gcd(WORD_BYTES, *(int(np.bitwise_or.reduce(column)) for column in columns))
