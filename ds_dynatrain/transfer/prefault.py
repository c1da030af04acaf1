"""Memory for a switch, allocated and touched while training still runs.

Memory that is touched for the first time costs more than any transport (about 2.5 GB/s in 4 KiB pages): the kernel
finds and zeroes each page. `allocate` asks for 2 MiB pages where the system grants them, which makes the first touch
about four times as fast, and `prefault` touches the pages in slices, from a thread that does not hold the interpreter
lock meanwhile.
"""

from __future__ import annotations

import mmap
import threading

import torch

from ds_dynatrain.errors import TransferError

HUGE_PAGE_BYTES = 2 * 1024 * 1024
PAGE_BYTES = mmap.PAGESIZE
SLICE_BYTES = 8 * 1024 * 1024
"""Bytes touched at once: 1 to 3 ms of one core, so that a waiting thread or a stop request is served soon."""


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D CPU tensor of `numel` elements whose pages are not mapped yet: zeros if it is large, else undefined.

    From 4 MiB on, it lies in an anonymous memory map on a 2 MiB boundary that asks for huge pages; the map goes back to
    the system when the last tensor that uses it is freed. Such a storage cannot be resized. `numel` must not be
    negative.
    """
    if numel < 0:
        raise TransferError(f"cannot allocate {numel} elements of {dtype}")
    size = numel * dtype.itemsize
    if size < 2 * HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype)
    area = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages: small pages do, only more slowly
        pass
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + size].view(dtype)


def prefault(
    tensor: torch.Tensor,
    *,
    slice_bytes: int = SLICE_BYTES,
    pause_seconds: float = 0.0,
    stop: threading.Event | None = None,
) -> bool:
    """Write to every page of a 1-D contiguous CPU tensor, slice by slice; False when `stop` ended it early.

    Elements at page starts become zero, so call it before the tensor holds anything. The interpreter lock is free
    during a slice; between slices the thread waits `pause_seconds`.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TransferError(f"only contiguous CPU tensors can be touched, got one on {tensor.device}")
    pages = tensor.detach().view(torch.uint8).numpy()
    for begin in range(0, pages.size, slice_bytes):
        if stop is not None and stop.is_set():
            return False
        part = pages[begin : begin + slice_bytes]
        part[::PAGE_BYTES] = 0
        part[-1] = 0
        if pause_seconds:
            (stop or threading.Event()).wait(pause_seconds)
    return True
