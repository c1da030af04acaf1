"""Progress of this process's main thread, as observed from another thread.

Heartbeats come from a separate thread: they show that a process is alive, not that its script makes progress. A call
that never returns (a deadlock, a file system that is gone) holds up all members, because each step needs all of them.

To observe progress, the interpreter is given a pending call, which the main thread runs as soon as it runs any Python
code. NVIDIA's resiliency extension does the same (`progress_watchdog`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WAITING = ("torch.distributed",)
"""Modules, including their submodules, in which a thread waits for other processes. If the wait never ends, those other
processes are at fault."""


class OwnWaits:
    """Calls of this library in which the main thread may legitimately wait for a long time, and which do not count as
    being stuck."""

    def __init__(self) -> None:
        self._waits: list[tuple[str, float]] = []

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context manager for a block that may legitimately take long.

        It has no effect outside the main thread, because no other thread can hold up members.

        what: a word that the status shows, such as "saving".
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waits.append((what, time.monotonic()))
        try:
            yield
        finally:
            self._waits.pop()

    def __str__(self) -> str:
        """Return the outermost of these blocks and its duration, such as "saving, 140 s"; "" if there is none."""
        for what, since in self._waits[:1]:
            return f"{what}, {time.monotonic() - since:.0f} s"
        return ""


OWN_WAITS = OwnWaits()
"""The waits of this process. Its main thread declares them, and its heartbeats report them."""


class MainThread:
    """Progress of the main thread, observed by one other thread.

    waits_in: modules in which the main thread waits for other processes; see `WAITING`.
    """

    def __init__(self, waits_in: tuple[str, ...] = WAITING) -> None:
        self._waits_in = waits_in
        self._asked_at = 0.0
        self._is_asked = False
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._run)
        self._ask = ctypes.pythonapi.Py_AddPendingCall
        self._ask.argtypes, self._ask.restype = (kind, ctypes.c_void_p), ctypes.c_int

    def blocked_seconds(self) -> float:
        """Return the number of seconds for which the main thread has run no Python code; 0 inside an `OwnWaits.waiting`
        block and inside the modules `waits_in`."""
        if not self._is_asked:
            self._asked_at, self._is_asked = time.monotonic(), True
            self._is_asked = self._ask(self._callback, None) == 0  # with too many pending calls, try again next time
        seconds = time.monotonic() - self._asked_at
        return 0.0 if str(OWN_WAITS) or is_in(self._waits_in) else seconds

    def _run(self, _: object) -> int:
        self._is_asked = False
        return 0


def stands_at() -> str:
    """Return the file, line and function that the main thread is executing, for the log; "" if the thread has ended."""
    frame = _frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def is_in(modules: tuple[str, ...]) -> bool:
    """Return whether the main thread is executing a call into one of these modules."""
    frame = _frame()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False


def _frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)
