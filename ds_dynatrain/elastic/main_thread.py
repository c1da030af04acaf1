"""Whether the main thread of this process still gets on, as another thread can tell.

Heartbeats come from a thread of their own: they say that a process is alive, not that its script is. A call that never
returns (a deadlock, a file system that is gone) holds up all others, since each step needs everybody.

Method: a pending call of the interpreter, as in NVIDIA's resiliency extension (`progress_watchdog`). The main thread
runs it as soon as it runs any Python code.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

WAITING = ("torch.distributed",)
"""Modules, with all below them, in which a thread waits for other processes: who is stuck there may well be fine."""


class MainThread:
    """Asked by one other thread, again and again. waits_in: see `WAITING`."""

    def __init__(self, waits_in: tuple[str, ...] = WAITING) -> None:
        self._waits_in = waits_in
        self._asked_at = 0.0
        self._is_asked = False
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._run)
        self._ask = ctypes.pythonapi.Py_AddPendingCall
        self._ask.argtypes, self._ask.restype = (kind, ctypes.c_void_p), ctypes.c_int

    def blocked_seconds(self) -> float:
        """For how long it has run no Python code, outside of what waits for other processes; 0 if it does that."""
        if not self._is_asked:
            self._asked_at, self._is_asked = time.monotonic(), True
            self._is_asked = self._ask(self._callback, None) == 0  # else too many are pending: next time
        seconds = time.monotonic() - self._asked_at
        return 0.0 if is_in(self._waits_in) else seconds

    def _run(self, _: object) -> int:
        self._is_asked = False
        return 0


def is_in(modules: tuple[str, ...]) -> bool:
    """Whether the main thread is in a call of one of these modules."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False
