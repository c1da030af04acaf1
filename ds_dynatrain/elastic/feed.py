"""Values that are made on one thread and read on others, which can neither change them nor hold that thread up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

FRESH_SECONDS = 0.5
"""However many ask, a value is made no more often than that,"""
REST = 20.0
"""and, where it takes long, no sooner than so many times what the last one took."""
PATIENCE_SECONDS = 2.0
"""So long a reader waits for the first value; later ones get what there is."""


class Feed(Generic[Value]):
    """The newest value. make: runs where `call_soon` lets it run, and only once somebody has asked."""

    def __init__(self, make: Callable[[], Value], call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._make, self._call_soon = make, call_soon
        self._changed = threading.Condition()
        self._value: Value | None = None
        self._fresh_until = 0.0
        self._is_asked = False

    def read(self) -> Value | None:
        """In any thread: a value that is fresh, or the last one if none comes in time; None if there never was one."""
        with self._changed:
            if time.monotonic() >= self._fresh_until and not self._is_asked:
                self._is_asked = True
                try:
                    self._call_soon(self._refresh)
                except RuntimeError:  # the loop has ended: what there is, is the end
                    self._is_asked = False
            self._changed.wait_for(lambda: not self._is_asked, PATIENCE_SECONDS)
            return self._value

    def _refresh(self) -> None:
        value, begin = None, time.monotonic()
        try:
            value = self._make()
        finally:
            end = time.monotonic()
            with self._changed:
                self._fresh_until = end + max(FRESH_SECONDS, REST * (end - begin))
                self._value = self._value if value is None else value
                self._is_asked = False
                self._changed.notify_all()
