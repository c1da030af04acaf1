"""The logger of the package, `ds_dynatrain`: what it shows by default, and its lines about switches and long waits."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_dynatrain.report.event import SwitchEvent

LONG_SECONDS = 10.0
"""Seconds after which a wait is logged, once."""

logger = logging.getLogger("ds_dynatrain")


class DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that writes the package's log to stderr while `logging` is not configured.

    Warnings appear on every process, information on the first process of each node only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(asctime)s] ds_dynatrain: %(message)s", "%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a record; called by `logging`."""
        if logging.getLogger().handlers:
            return False  # `logging` has been configured since, and its own handlers show the record
        return record.levelno >= logging.WARNING or os.environ.get("LOCAL_RANK", "0") == "0"


def show_by_default() -> None:
    """Show switches, joins, leaves and deaths on stderr, unless the script has configured `logging` already.

    Called by `initialize`, `init_distributed` and the agent of an elastic launch. `logging.getLogger("ds_dynatrain")
    .setLevel("WARNING")` hides them.
    """
    if not logger.hasHandlers():
        logger.addHandler(DefaultHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


@contextmanager
def telling_if_long(what: str | Callable[[], str]) -> Iterator[None]:
    """Log what a blocking call waits for, once, if the block lasts longer than `LONG_SECONDS`."""

    def tell() -> None:
        logger.info("has waited %g s for %s", LONG_SECONDS, what if isinstance(what, str) else what())

    timer = threading.Timer(LONG_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_event(event: SwitchEvent) -> None:
    """Log one event: a committed switch as information (a warning if it has warnings), any other end as a warning."""
    quiet = event.outcome == "committed" and not event.warnings
    logger.log(logging.INFO if quiet else logging.WARNING, "%s", event.line())


def log_gain(event: SwitchEvent) -> None:
    """Log how much faster steps became after a switch that was made to save time, as a later window has measured."""
    gains = 100 * (event.measured_gain or 0.0), 100 * (event.predicted_gain or 0.0)
    logger.info("switch %d: steps take %.1f %% less since, predicted %.1f %%", event.generation, *gains)


def log_recompile(event: SwitchEvent) -> None:
    """Log how long the first step after a switch took to compile again."""
    logger.info("switch %d: compiled again in %.0f ms, after the pause", event.generation, event.recompile_ms or 0.0)
