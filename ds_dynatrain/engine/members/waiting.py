"""Says who is waited for, where a wait has no end of its own: whoever reads the log sees which process to look at."""

from __future__ import annotations

import time
from collections.abc import Callable

from ds_dynatrain.report import logger

LONG_SECONDS = 10.0


class Wait:
    """One wait. whom: what is waited for just now, asked once, after `LONG_SECONDS`."""

    def __init__(self, whom: Callable[[], str]) -> None:
        self._whom = whom
        self._end = time.monotonic() + LONG_SECONDS
        self._has_told = False

    def look(self) -> None:
        """To be called again and again while it lasts."""
        if not self._has_told and time.monotonic() > self._end:
            self._has_told = True
            logger.warning("waiting for %g s already: for %s", LONG_SECONDS, self._whom())
