"""Signals and lifetime of a worker process: it ends with its agent, notices SIGTERM at once, and keeps its forked
children from acting as members.

Python runs a signal's handler only once the main thread executes Python code again. While that thread waits inside a
collective, the handler runs seconds late, or never. The interpreter's wake-up descriptor receives a byte at once, and
another thread reads it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from ds_dynatrain.errors import ElasticError

PR_SET_PDEATHSIG = 1
"""The number of this prctl request in <sys/prctl.h>."""
SIGTERM = bytes([signal.SIGTERM])


def end_with_parent(agent: int | None = None) -> None:
    """Make Linux kill this process when the agent's thread that started it ends; exit at once if the agent has already
    ended.

    torchrun starts workers in sessions of their own. Without this call they would continue to train alone after their
    agent is killed.

    agent: process id of the agent; None if unknown.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or (agent is not None and not _is_alive(agent)):
        os._exit(1)


def at_exit(call: Callable[..., Any], *arguments: Any) -> None:
    """Register a function to be called when this process ends. Unlike `atexit`, it is not called when a forked child
    ends."""
    process = os.getpid()
    atexit.register(lambda: call(*arguments) if os.getpid() == process else None)


def in_forked_children(method: Callable[[], Any]) -> None:
    """Register a bound method to be called in every child process forked from this one, for as long as the method's
    object exists.

    Processes started by fork and exec inherit none of Python's sockets and need no such call. Raises TypeError if
    `method` is not a bound method.
    """
    weak = weakref.WeakMethod(method)

    def run() -> None:
        alive = weak()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=run)


def _is_alive(process: int) -> bool:
    """Return whether a process is running.

    Returns False for a zombie: a killed process whose parent has not waited for it, as in a container without an init
    process.
    """
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class Termination:
    """Watcher for SIGTERM, with a descriptor that becomes readable when the signal arrives. The script's own handler is
    still called."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._previous: Any = signal.SIG_DFL
        self._is_watching = False
        self._wakes = False

    def watch(self) -> None:
        """Start watching for SIGTERM. Raises ElasticError if called outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ElasticError(
                "signals can be watched from the main thread only, and this is thread "
                f"{threading.current_thread().name!r}; call initialize on the main thread"
            )
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        taken = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._wakes = taken == -1
        if not self._wakes:  # keep an event loop's descriptor; SIGTERM is noticed a little later
            signal.set_wakeup_fd(taken)
        self._is_watching = True
        in_forked_children(self._leave_to_the_parent)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable after a signal. Intended for polling."""
        return self._receiver.fileno()

    def read(self) -> bool:
        """Return whether SIGTERM has arrived since the last call. Never blocks."""
        try:
            return SIGTERM in self._receiver.recv(4096)
        except BlockingIOError:
            return False

    def wake(self) -> None:
        """Make the watcher's descriptor readable without a signal, to wake a thread that polls it."""
        self._send(b"\0")

    def stop(self) -> None:
        """Stop watching, and restore the script's own handler. Has no effect outside the main thread."""
        if self._is_watching and threading.current_thread() is threading.main_thread():
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._wakes:
            self._send(SIGTERM)
        if callable(self._previous):
            self._previous(number, frame)
        elif not self._is_watching:  # a later watcher has put this handler back
            signal.signal(number, self._previous)
            signal.raise_signal(number)

    def _send(self, what: bytes) -> None:
        with suppress(BlockingIOError):  # the buffer is full, so it is readable
            self._sender.send(what)

    def _restore(self) -> None:
        self._is_watching = False
        if self._wakes:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def _leave_to_the_parent(self) -> None:
        """Stop watching in a forked child.

        Otherwise a signal that ends a data loader's worker would look as if the parent had been asked to leave.
        """
        if self._is_watching:
            self._restore()
            os.close(self._receiver.detach())
            os.close(self._sender.detach())
