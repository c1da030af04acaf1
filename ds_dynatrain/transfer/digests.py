"""Digests of elements and their logical positions, which are additive over disjoint pieces under any layout.

A logical tensor is read as its row-major bytes, padded with zeros to whole 32-bit words (little endian). Its digest
is

    sum over words of  word[j] * weight[j]   mod 2^64,      weight[j] = table[j mod T] * factor[j div T]

so a piece that starts or ends inside a word contributes its bytes, and the digests of any partition of a tensor have
the same sum. Every weight is odd and pseudo-random (splitmix64), so one changed word always changes the digest, and a
swap, a shift or a pair of sign flips does so with probability 1 - 2^-32 or better. Words have 32 bits because with
64-bit words the sign bit of every second float has weight 2^63, and two flips cancel.

Two words are processed at once for speed: for v = low + 2^32 * high,  v * a + (v >> 32) * b  weights `low` by a and
`high` by b + 2^32 * a; both are odd if a and b are odd. The tables (2 x 128 KiB) fit into the second-level cache.
`weighing` computes the sum. A digest detects mistakes; it does not protect against an adversary.

The mapping of buffer bytes to tensors depends on neither addresses nor values. For runs of a few KiB, computing it
takes longer than an accelerator needs to read the bytes, so `ReadyDigest` computes it ahead of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import BufferId, Pieces
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.tensor import split_by_tensor
from ds_dynatrain.transfer import device_digest
from ds_dynatrain.transfer.device_digest import DeviceTable, by_arithmetic, has_kernel
from ds_dynatrain.transfer.series import series
from ds_dynatrain.transfer.transport import bytes_of
from ds_dynatrain.transfer.weighing import SPREAD_BYTES, UNIT_BYTES, HostRuns, UInt64s, is_compiled, summer

SPARSEST = 8
"""Limit without compiled code: runs are summed together in one spread-out array only if the step between them is at
most this many times their length."""
AT_ONCE = 1 << 16
"""Number of table rows that are converted to Python integers at a time."""
_MASK = (1 << 64) - 1


def digest(values: torch.Tensor, start: int = 0) -> int:
    """Return the digest, in [0, 2^64), of consecutive elements of one logical tensor.

    values: the elements, 1-D and contiguous, of any dtype and on any device; the digest does not depend on the device.
    start: the index of the first element in the tensor.

    Digests of disjoint parts of a tensor add up, modulo 2^64, to the digest of the whole tensor.
    """
    if values.device.type != "cpu":
        return digest_on_device(values, start)
    data = bytes_of(values).numpy()
    return summer().sum(data, HostRuns(0, 0, 1, len(data), start * values.element_size(), 0)) & _MASK


def digest_on_device(values: torch.Tensor, start: int = 0) -> int:
    """Return the same digest as `digest`, computed on the device of `values`."""
    size, data = values.element_size(), bytes_of(values)
    if values.numel() == 0:
        return 0
    if not has_kernel(values.device):
        return by_arithmetic(data, start * size)
    run = device_digest.DeviceRuns(*(np.array([value]) for value in (0, start * size, data.numel(), 0)))
    return int(DeviceTable.of(run, np.array([0]), values.device).digests([data], 1)[0])


class Form(NamedTuple):
    """The element size in bytes and the device of a buffer. Both are known before the buffer is allocated."""

    itemsize: int
    device: torch.device

    @staticmethod
    def all_of(buffers: Mapping[BufferId, torch.Tensor], names: Iterable[BufferId]) -> tuple[Form, ...]:
        """Return the element sizes and devices of the named buffers. Raises TransferError if a buffer is missing."""
        found = []
        for name in names:
            values = _named(buffers, name)
            found.append(Form(values.element_size(), values.device))
        return tuple(found)


@dataclass(frozen=True)
class Rows:
    """Series of byte ranges on one device that are digested one after another, without the accelerator's kernel.

    table: one column per series: the numbers of its tensor and its buffer, and the fields of `HostRuns`.
    """

    table: Ints

    @property
    def nbytes(self) -> int:
        """Number of bytes of memory that the table takes."""
        return self.table.nbytes

    def digests(self, data: Sequence[torch.Tensor], tensors: int) -> UInt64s:
        """Return the digest of each tensor, computed without the accelerator's kernel.

        data: the buffers as bytes.
        tensors: the number of tensors.
        """
        sums, found = [0] * tensors, summer()
        on_host = [values.numpy() if values.device.type == "cpu" else None for values in data]
        for begin in range(0, self.table.shape[1], AT_ONCE):
            for tensor, source, *numbers in zip(*self.table[:, begin : begin + AT_ONCE].tolist(), strict=True):
                runs, there = HostRuns(*numbers), on_host[source]
                if there is not None:
                    added = found.sum(there, runs)
                else:
                    added = by_arithmetic(data[source][runs.first : runs.first + runs.length], runs.begin)
                sums[tensor] = (sums[tensor] + added) & _MASK
        return np.array(sums, dtype=np.uint64)


@dataclass(frozen=True)
class ReadyDigest:
    """A computation of digests, prepared for some buffers of one state kind (such as masters).

    buffers: the name of each buffer.
    forms: the element size and the device of each buffer.
    reach: the minimum size of each buffer, in elements.
    tensors: the number of tensors, each of which gets a digest.
    parts: the prepared computation for each device.
    nbytes: the memory that the prepared tables use on all devices, in bytes.
    """

    buffers: tuple[BufferId, ...]
    forms: tuple[Form, ...]
    reach: tuple[int, ...]
    tensors: int
    parts: tuple[Rows | DeviceTable, ...]
    nbytes: int

    @staticmethod
    def of(pieces: Pieces, forms: Sequence[Form], bases: Ints) -> ReadyDigest:
        """Prepare the computation of the digests of tensors that pieces cover.

        forms: the element size and the device of each buffer of `pieces`.
        bases: sorted coordinates; tensor i has the coordinates bases[i] to bases[i + 1].
        """
        reach, columns = _reach(pieces, bases), _cut_at_tensors(pieces, bases)
        parts, nbytes, buffers_on = list[Rows | DeviceTable](), 0, dict[torch.device, list[int]]()
        for number, form in enumerate(forms):
            buffers_on.setdefault(form.device, []).append(number)
        sizes = np.array([form.itemsize for form in forms], dtype=np.int64)
        for device, numbers in buffers_on.items():
            mine = columns[:, np.isin(columns[3], numbers)] if len(buffers_on) > 1 else columns
            parts.append((_table if has_kernel(device) else _rows)(mine, sizes, device))
            nbytes += parts[-1].nbytes
        return ReadyDigest(pieces.buffers, tuple(forms), reach, len(bases) - 1, tuple(parts), nbytes)

    def digests(self, buffers: Mapping[BufferId, torch.Tensor]) -> UInt64s:
        """Return the digest of each tensor. Raises TransferError if a buffer is missing, too short, on another device,
        or of another element size."""
        data, sums = [], np.zeros(self.tensors, dtype=np.uint64)
        for name, form, reach in zip(self.buffers, self.forms, self.reach, strict=True):
            values = _named(buffers, name)
            data.append(bytes_of(values))
            if (found := Form(values.element_size(), values.device)) != form:
                raise TransferError(
                    f"buffer {tuple(name)} has elements of {found.itemsize} bytes on {found.device}, and the digest "
                    f"was made for {form.itemsize} bytes on {form.device}: make it ready for this buffer"
                )
            if reach > values.numel():
                raise TransferError(
                    f"a piece that ends at element {reach} leaves buffer {tuple(name)} of {values.numel()} elements"
                )
        for part in self.parts:
            sums += part.digests(data, self.tensors)
        return sums


def digest_pieces(pieces: Pieces, buffers: Mapping[BufferId, torch.Tensor], bases: Ints) -> UInt64s:
    """Return the digests of many tensors of one state kind, computed from the pieces (ranges of elements) that one rank
    holds.

    The result has one uint64 per tensor.

    buffers: the 1-D buffers that the pieces name.
    bases: sorted coordinates; tensor i has the coordinates bases[i] to bases[i + 1].

    A piece may span any number of tensors. Elements that no piece covers add nothing, so if ranks hold disjoint parts,
    the sum (modulo 2^64) of their results is the digest of the whole tensors. Raises TransferError if a piece exceeds
    its buffer or the range of coordinates.
    """
    return ReadyDigest.of(pieces, Form.all_of(buffers, pieces.buffers), bases).digests(buffers)


def _named(buffers: Mapping[BufferId, torch.Tensor], name: BufferId) -> torch.Tensor:
    if name not in buffers:
        raise TransferError(f"the pieces lie in buffer {tuple(name)}, which is not among the {len(buffers)} given")
    return buffers[name]


def _reach(pieces: Pieces, bases: Ints) -> tuple[int, ...]:
    """Return the minimum number of elements of each buffer that is needed to contain the pieces.

    Raises TransferError for a piece outside the range of coordinates, or with a negative offset.
    """
    reach = np.zeros(len(pieces.buffers), dtype=np.int64)
    if len(pieces):
        low, high = int(pieces.start.min()), int(pieces.stop.max())
        if low < bases[0] or high > bases[-1]:
            raise TransferError(f"pieces [{low}, {high}) leave the line [{int(bases[0])}, {int(bases[-1])})")
        row = int(pieces.offset.argmin())
        if pieces.offset[row] < 0:
            piece, name = f"[{pieces.start[row]}, {pieces.stop[row]})", pieces.buffers[pieces.buffer[row]]
            raise TransferError(f"piece {piece} at offset {pieces.offset[row]} leaves buffer {tuple(name)}")
        np.maximum.at(reach, pieces.buffer, pieces.offset + pieces.stop - pieces.start)
    return tuple(reach.tolist())


def _cut_at_tensors(pieces: Pieces, bases: Ints) -> Ints:
    """Cut pieces at the boundaries between tensors. Return an array with one column per part; its rows are the tensor,
    the index of the part's first element in the tensor, the length, the buffer, and the offset in the buffer."""
    tensor, part = split_by_tensor(bases, pieces)
    return np.stack([tensor, part.start - bases[tensor], part.stop - part.start, part.buffer, part.offset])


def _table(columns: Ints, sizes: Ints, device: torch.device) -> DeviceTable:
    tensor, begin, count, source, at = columns
    size = sizes[source]
    return DeviceTable.of(device_digest.DeviceRuns(at * size, begin * size, count * size, tensor), source, device)


def _rows(columns: Ints, sizes: Ints, device: torch.device) -> Rows:
    """Combine ranges of equal length at equal distances into series. Without compiled code, only ranges that lie close
    together are combined.

    columns: the result of `_cut_at_tensors`.
    sizes: the element size of each buffer.
    """
    tensor, begin, count, source, at = columns
    first, number = np.arange(len(tensor)), np.ones(len(tensor), dtype=np.int64)
    if device.type == "cpu":
        same = (tensor * (int(source.max(initial=0)) + 1) + source) * (int(count.max(initial=0)) + 1) + count
        gap = np.diff(begin, append=0)
        apart = gap <= 0
        if not is_compiled():
            apart |= (gap > SPARSEST * count) | (count * UNIT_BYTES > SPREAD_BYTES)
        same[apart] = -1 - np.flatnonzero(apart)
        first, number = series(same, begin, at)
    second = np.minimum(first + 1, len(tensor) - 1)
    step = np.where(number > 1, begin[second] - begin[first], 0)
    stride = np.where(number > 1, at[second] - at[first], 0)
    size = sizes[source[first]]
    found = (at[first] * size, stride * size, number, count[first] * size, begin[first] * size, step * size)
    return Rows(np.stack([tensor[first], source[first], *found]))
