"""Reading the memory of another process on the same machine: Linux's process_vm_readv, one copy and no message.

The kernel lets a process do it that might debug the other one: the same user, and where Yama restricts that to
descendants, a process that was given leave by `permit_readers`, as the shared-memory transports of MPI libraries do.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from ds_dynatrain.errors import TransferError

MOST_BYTES = 1 << 30
"""One call moves no more than 2^31 - 1 bytes."""
PR_SET_PTRACER = 0x59616D61
ANYBODY, NOBODY = -1, 0
"""Of the same user. From <linux/prctl.h>."""


class _Region(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def machine() -> str:
    """Equal in processes of which one may be able to read the other: the same boot, processes and sockets.

    Empty where there is no such call.
    """
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def permit_readers(who: int = ANYBODY) -> None:
    """Let other processes of this user read this one's memory where Yama would forbid it; no matter if it cannot."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(who & (1 << 64) - 1), 0, 0, 0)


def read_memory(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous uint8 tensor in host memory with the bytes from `address` on of a process.

    TransferError if the kernel does not permit it, or there is no such process or memory.
    """
    library, done, length = ctypes.CDLL(None, use_errno=True), 0, into.numel()
    library.process_vm_readv.restype = ctypes.c_ssize_t
    while done < length:
        part = min(length - done, MOST_BYTES)
        here, there = _Region(into.data_ptr() + done, part), _Region(address + done, part)
        count = library.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            why = os.strerror(ctypes.get_errno()) if count else "nothing was read"
            raise TransferError(f"cannot read {length - done} bytes of process {process}: {why}")
        done += count
