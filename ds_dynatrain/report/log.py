"""The package's logger, `ds_dynatrain`: its default handler, and functions that log switches and long waits."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_dynatrain.report.event import SwitchEvent

LONG_SECONDS = 10.0
"""Number of seconds after which a wait is logged, once."""

logger = logging.getLogger("ds_dynatrain")


class DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes the package's log to stderr unless `logging` has been configured.

    Warnings are shown by every process, information only by the first process of each node.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(asctime)s] ds_dynatrain: %(message)s", "%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a record; called by `logging`."""
        if logging.getLogger().handlers:
            return False  # `logging` was configured later, and its own handlers show the record
        return record.levelno >= logging.WARNING or os.environ.get("LOCAL_RANK", "0") == "0"


def show_by_default() -> None:
    """Show switches, joins, leaves and deaths on stderr, unless the script has already configured `logging`.

    Called by `initialize`, `init_distributed` and the agent of an elastic launch. `logging.getLogger("ds_dynatrain")
    .setLevel("WARNING")` hides these messages.
    """
    if not logger.hasHandlers():
        logger.addHandler(DefaultHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


@contextmanager
def telling_if_long(what: str | Callable[[], str]) -> Iterator[None]:
    """Context manager that logs once what it waits for if its block takes longer than `LONG_SECONDS`.

    what: a description of what the block waits for, or a function that returns one.
    """

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
    """Log a switch: as information if it was committed without warnings, else as a warning."""
    quiet = event.outcome == "committed" and not event.warnings
    logger.log(logging.INFO if quiet else logging.WARNING, "%s", event.line())


def log_gain(event: SwitchEvent) -> None:
    """Log the measured change in step time after a switch that was meant to save time."""
    gains = 100 * (event.measured_gain or 0.0), 100 * (event.predicted_gain or 0.0)
    logger.info("switch %d: steps take %.1f %% less since, predicted %.1f %%", event.generation, *gains)
    if event.slowdown_removed is not None:
        logger.info("balance: %.0f %% of the time lost to slow members is removed", 100 * event.slowdown_removed)


def log_recompile(event: SwitchEvent) -> None:
    """Log how long recompilation took in the first step after a switch."""
    logger.info("switch %d: compiled again in %.0f ms, after the pause", event.generation, event.recompile_ms or 0.0)
