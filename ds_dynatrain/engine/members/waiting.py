"""Says who is waited for, where a wait has no end of its own: log and status tell which process to look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from ds_dynatrain.report import logger

LONG_SECONDS = 10.0


class Wait:
    """`with Wait(whom, say) as wait:`, one wait. whom: what is waited for just now, asked every `LONG_SECONDS`; say:
    where the status has it from, empty once the wait is over."""

    def __init__(self, whom: Callable[[], str], say: Callable[[str], None]) -> None:
        self._whom = whom
        self._say = say
        self._has_told = False
        self._next = time.monotonic() + LONG_SECONDS

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.rest()

    def look(self) -> None:
        """To be called again and again while it lasts."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LONG_SECONDS
        whom = self._whom()
        self._say(whom)
        if not self._has_told:
            self._has_told = True
            logger.warning("waiting for %g s already, for %s; look at their logs if it goes on", LONG_SECONDS, whom)

    def rest(self) -> None:
        """Nobody is waited for just now; what comes next is another wait."""
        if self._has_told:
            self._has_told = False
            self._say("")
        self._next = time.monotonic() + LONG_SECONDS
