"""Digests made ready: for whatever memory comes they are those of values that are there, and for no other pieces.

The kernel's part is played here, from the memory at the addresses that it is given.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import TransferError
from ds_dynatrain.space import BufferId, Piece, Pieces
from ds_dynatrain.transfer import Form, ReadyDigest, device_digest, digest, digest_pieces, digests, weighing
from ds_dynatrain.transfer.device_digest import DeviceRuns, programs
from ds_dynatrain.transfer.weighing import InNumpy, summer
from tests.space.laid import pieces_of

CPU = torch.device("cpu")
NAMES = (BufferId("group", 0), BufferId("group", 1), BufferId("tensor", 7))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
Held = dict[BufferId, torch.Tensor]


def room_for(numel: int, dtype: torch.dtype, seed: int, skip: int) -> torch.Tensor:
    """Random bits in memory of their own, `skip` elements behind its begin."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, ((numel + skip) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)[skip:]


def expected(pieces: Pieces, held: Held, bases: np.ndarray) -> list[int]:
    """Piece by piece and tensor by tensor."""
    sums = []
    for low, high in pairwise(bases.tolist()):
        parts = 0
        for start, stop, name, offset in pieces:
            begin, end = max(low, start), min(high, stop)
            if begin < end:
                parts += digest(held[name][offset + begin - start : offset + end - start].clone(), begin - low)
        sums.append(parts % (1 << 64))
    return sums


class Kernel:
    """Stands for the module of the kernel; keeps what it was launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def launch(self, runs: torch.Tensor, done: torch.Tensor, width: int, _: torch.Tensor, sums: torch.Tensor) -> None:
        assert runs.dtype == done.dtype == torch.int64
        assert runs.is_contiguous() and done.is_contiguous()
        self.launched.append((runs, done, width))
        found = sums.numpy().view(np.uint64)
        for address, begin, length, tensor in runs.T.tolist():
            data = np.frombuffer(ctypes.string_at(address, length), np.uint8)
            total = summer().sum(data, weighing.HostRuns(0, 0, 1, length, begin, 0))
            found[tensor] = (int(found[tensor]) + total) % (1 << 64)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The host counts as an accelerator with a kernel."""
    found = Kernel()
    monkeypatch.setitem(sys.modules, "ds_dynatrain.transfer.digest_kernel", found)  # type: ignore[arg-type]
    monkeypatch.setattr(digests, "has_kernel", lambda _: True)
    return found


@st.composite
def laid(draw: st.DrawFn) -> tuple[Pieces, np.ndarray]:
    """Pieces of a few tensors in three buffers, some of them at equal steps, and where the tensors begin."""
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    bases = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total, every = int(bases[-1]), draw(st.integers(1, 20))
    cuts = {*range(0, total, every)} if draw(st.booleans()) else set(draw(st.lists(st.integers(0, total), max_size=9)))
    found, ends = [], dict.fromkeys(NAMES, draw(st.integers(0, 3)))
    for low, high in pairwise(sorted({0, total, *cuts})):
        name = draw(st.sampled_from((*NAMES, None)))
        if name is not None:
            found.append(Piece(low, high, name, ends[name]))
            ends[name] += high - low + draw(st.integers(0, 2))
    return pieces_of(found), bases


def memories(pieces: Pieces, dtypes: tuple[torch.dtype, ...], seed: int, skip: int) -> Held:
    """Memory for every buffer, each of its type."""
    return {
        name: room_for(400, dtypes[at % len(dtypes)], seed + at, skip + at) for at, name in enumerate(pieces.buffers)
    }


@pytest.mark.parametrize("dtypes", [*((each,) for each in DTYPES), (torch.bfloat16, torch.float32)], ids=str)
@given(lay=laid(), skip=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_one_table_serves_all_memory(
    dtypes: tuple[torch.dtype, ...], lay: tuple[Pieces, np.ndarray], skip: int
) -> None:
    pieces, bases = lay
    ready = None
    for seed in (1, 2):
        held = memories(pieces, dtypes, seed, skip * seed)
        ready = ready or ReadyDigest.of(pieces, Form.all_of(held, pieces.buffers), bases)
        found = ready.digests(held)
        assert found.dtype == np.uint64
        assert found.tolist() == digest_pieces(pieces, held, bases).tolist() == expected(pieces, held, bases)


@pytest.mark.parametrize("many", [1, 1000], ids=["on the device", "here"])
@given(lay=laid(), skip=st.integers(0, 3), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_the_kernel_gets_what_absolute_addresses_give(
    many: int, lay: tuple[Pieces, np.ndarray], skip: int, dtype: torch.dtype
) -> None:
    (pieces, bases), launched = lay, Kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ds_dynatrain.transfer.digest_kernel", launched)  # type: ignore[arg-type]
        patch.setattr(digests, "has_kernel", lambda _: True)
        patch.setattr(device_digest, "MANY_RUNS", many)
        ready = ReadyDigest.of(pieces, [Form(dtype.itemsize, CPU)] * len(pieces.buffers), bases)
        for seed in (1, 2):
            held = memories(pieces, (dtype,), seed, skip * seed)
            assert ready.digests(held).tolist() == expected(pieces, held, bases)
    tensor, begin, count, source, at = digests._cut_at_tensors(pieces, bases)
    assert len(launched.launched) == (2 if len(tensor) else 0)
    if len(tensor):
        base = np.array([held[name].data_ptr() for name in pieces.buffers])[source]
        size = dtype.itemsize
        runs = DeviceRuns(base + at * size, begin * size, count * size, tensor)
        columns, done, width = launched.launched[-1]
        assert np.array_equal(columns.numpy(), np.stack(runs))
        assert np.array_equal(done.numpy(), np.stack(programs(runs)))
        assert width == np.gcd.reduce([4, *np.concatenate(runs[:3])])


def test_a_large_tensor_has_programs_for_all_its_blocks(kernel: Kernel) -> None:
    """A run of many spans between short ones."""
    length = 40 * weighing.BLOCK_BYTES // 4 + 11
    pieces = pieces_of(
        [Piece(3, 5, NAMES[0], 0), Piece(6, length, NAMES[0], 2), Piece(length + 1, length + 4, NAMES[1], 1)]
    )
    held, bases = {name: room_for(length, torch.float32, 3, 1) for name in NAMES[:2]}, np.array([0, length + 10])
    assert digest_pieces(pieces, held, bases).tolist() == expected(pieces, held, bases)
    assert np.array_equal(kernel.launched[0][1][0].unique().numpy(), [0, 1, 2])


def test_without_a_kernel_a_device_sums_row_by_row() -> None:
    """Its rows are single runs, by torch's arithmetic."""
    start = np.arange(0, 400, 40)
    pieces = Pieces(start, start + 4, start * 0, start // 10, NAMES[:1])
    held, bases = {NAMES[0]: room_for(40, torch.float32, 1, 0)}, np.array([0, 500])
    rows = digests._rows(digests._cut_at_tensors(pieces, bases), np.array([4]), torch.device("meta"))
    assert rows.table.shape == (8, len(start)) and (rows.table[4] == 1).all()
    on_host = digests._rows(digests._cut_at_tensors(pieces, bases), np.array([4]), CPU)
    data = held[NAMES[0]].view(torch.uint8)

    class There:
        device = SimpleNamespace(type="lab")

        def __getitem__(self, part: slice) -> torch.Tensor:
            return data[part]

    there: Any = There()
    assert rows.digests([there], 1).tolist() == on_host.digests([data], 1).tolist()


def test_what_is_weighed_at_once_by_numpy_is_not_spread_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, runs at equal steps are one row however far apart; the number is the same."""
    start = np.arange(0, 10000, 100)
    pieces = Pieces(start, start + 4, start * 0, start // 25, NAMES[:1])
    held, bases = {NAMES[0]: room_for(400, torch.float32, 1, 0)}, np.array([0, 10000])
    numbers = {}
    for compiled in (True, False):
        monkeypatch.setattr(digests, "is_compiled", lambda compiled=compiled: compiled)
        monkeypatch.setattr(digests, "summer", InNumpy if not compiled else summer)
        ready = ReadyDigest.of(pieces, Form.all_of(held, NAMES[:1]), bases)
        numbers[compiled] = ready.parts[0].table.shape[1], ready.digests(held).tolist()
    assert numbers[True][1] == numbers[False][1]
    assert numbers[True][0] < 4 and numbers[False][0] == len(start)


def test_other_buffers_are_refused() -> None:
    pieces, bases = pieces_of([Piece(0, 10, NAMES[0], 2)]), np.array([0, 10])
    ready = ReadyDigest.of(pieces, [Form(4, CPU)], bases)
    assert ready.digests({NAMES[0]: torch.ones(12)}).tolist() == [digest(torch.ones(10))]
    with pytest.raises(TransferError, match=r"ends at element 12 leaves buffer .* of 11 elements"):
        ready.digests({NAMES[0]: torch.ones(11)})
    with pytest.raises(TransferError, match="elements of 2 bytes on cpu, and the digest was made for 4 bytes"):
        ready.digests({NAMES[0]: torch.ones(12, dtype=torch.bfloat16)})
    with pytest.raises(TransferError, match="not among"):
        ready.digests({NAMES[1]: torch.ones(12)})
    with pytest.raises(TransferError, match="at offset -1 leaves buffer"):
        ReadyDigest.of(Pieces(*(np.array([each]) for each in (0, 4, 0, -1)), NAMES[:1]), [Form(4, CPU)], bases)


def test_a_table_takes_little_memory() -> None:
    """Of runs of a few KiB no more than a few hundredths."""
    count = 10000
    start = np.arange(count) * 4096
    pieces = Pieces(start, start + 1024, start * 0, start // 4, NAMES[:1])
    ready = ReadyDigest.of(pieces, [Form(4, CPU)], np.array([0, count * 4096]))
    assert ready.nbytes <= 200
    tables = device_digest.DeviceTable.of(DeviceRuns(start, start * 4, start * 0 + 4096, start * 0), start * 0, CPU)
    assert tables.nbytes <= 64 * count
