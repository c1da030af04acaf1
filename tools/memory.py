"""Resident memory of this process, its high-water mark, threads and file descriptors, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return _status("VmRSS")


def high_water() -> int:
    """Return the peak memory of this process since `reset_high_water`, in bytes."""
    return _status("VmHWM")


def reset_high_water() -> None:
    """Reset the peak memory of this process to its current memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: these measurements need Linux")
