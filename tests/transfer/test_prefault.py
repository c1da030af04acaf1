"""Memory made ready ahead of time: sizes, alignment, resident pages, release."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer import allocate, prefault
from ds_dynatrain.transfer.prefault import HUGE_PAGE_BYTES

MEGABYTE = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 1000, 5 * MEGABYTE + 3])
def test_allocates_what_was_asked_for(numel: int, dtype: torch.dtype) -> None:
    values = allocate(numel, dtype)
    assert values.shape == (numel,) and values.dtype == dtype and values.is_contiguous()
    if values.numel() * dtype.itemsize >= 2 * HUGE_PAGE_BYTES:
        assert values.data_ptr() % HUGE_PAGE_BYTES == 0
    assert prefault(values)
    values.fill_(3)
    assert bool((values == 3).all())


def test_pages_are_resident_after_prefault_and_gone_after_release() -> None:
    before = resident_bytes()
    values = allocate(64 * MEGABYTE, torch.uint8)
    assert resident_bytes() - before < 8 * MEGABYTE
    assert prefault(values)
    assert resident_bytes() - before > 56 * MEGABYTE
    part = values[:10].view(torch.bfloat16)
    del values
    part.fill_(1.0)
    del part
    assert resident_bytes() - before < 8 * MEGABYTE


def test_a_stop_ends_it_early() -> None:
    stop = threading.Event()
    values = allocate(32 * MEGABYTE, torch.uint8)
    stop.set()
    assert not prefault(values, stop=stop)


def test_works_from_a_thread_and_fills_with_zeros() -> None:
    values = allocate(16 * MEGABYTE, torch.uint8)
    thread = threading.Thread(target=prefault, args=(values,))
    thread.start()
    thread.join()
    assert not values.any()


def test_bad_calls_are_refused() -> None:
    with pytest.raises(TransferError, match="-1 elements"):
        allocate(-1, torch.float32)
    with pytest.raises(TransferError, match="contiguous CPU"):
        prefault(torch.zeros(4, 4).t())
