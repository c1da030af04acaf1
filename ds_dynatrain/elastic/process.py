"""What a worker does about processes: it ends with its agent, and its children do not speak for it."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

PR_SET_PDEATHSIG = 1
"""The number of the request in <sys/prctl.h>."""


def end_with_parent(agent: int | None = None) -> None:
    """Let Linux kill this process when the thread that started it ends; at once if its agent is gone already.

    torchrun starts workers in sessions of their own: without this they train on, alone, when their agent is killed.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or (agent is not None and not _is_alive(agent)):
        os._exit(1)


def at_exit(call: Callable[..., Any], *arguments: Any) -> None:
    """Call it when this process ends, and not when one ends that the user has forked from it."""
    process = os.getpid()
    atexit.register(lambda: call(*arguments) if os.getpid() == process else None)


def in_forked_children(method: Callable[[], Any]) -> None:
    """Call a bound method in every process that is forked from this one, as long as its object lives.

    Processes that are started by fork and exec inherit none of Python's sockets and need nothing.
    """
    if not isinstance(method, MethodType):
        raise TypeError(f"expected a bound method, got {method!r}")
    weak = weakref.WeakMethod(method)

    def run() -> None:
        alive = weak()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=run)


def _is_alive(process: int) -> bool:
    """Whether it runs; one that was killed and not waited for, as in a container without an init, does not."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
    return stat.rpartition(")")[2].split()[0] not in "ZX"
