"""Process groups that are being taken down behind the training, each by a thread."""

from __future__ import annotations

import threading


class Teardowns:
    """Those of one process: whoever ends it waits for them first, because torch aborts a process that exits while a
    group is half gone. Any thread may add one."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def add(self, thread: threading.Thread) -> None:
        """It has been started, and ends by itself."""
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def finish(self, timeout_seconds: float) -> None:
        """Wait until no group is left half alive, at most the time-out each."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(timeout_seconds)
