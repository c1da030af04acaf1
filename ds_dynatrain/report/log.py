"""The logger of the package, named `ds_dynatrain`; `logging` decides what is shown of it."""

from __future__ import annotations

import logging

from ds_dynatrain.report.event import SwitchEvent

logger = logging.getLogger("ds_dynatrain")


def log_event(event: SwitchEvent) -> None:
    """Log one event: a committed switch as information (a warning if it has warnings), any other end as a warning.

    Warnings show without any set-up of `logging`; for every switch, `logging.basicConfig(level="INFO")`.
    """
    quiet = event.outcome == "committed" and not event.warnings
    logger.log(logging.INFO if quiet else logging.WARNING, "%s", event.line())


def log_gain(event: SwitchEvent) -> None:
    """Log, as information, what a later window has measured of a switch that was made to save time."""
    gains = 100 * (event.measured_gain or 0.0), 100 * (event.predicted_gain or 0.0)
    logger.info("switch %d: steps take %.1f %% less since, predicted %.1f %%", event.generation, *gains)


def log_recompile(event: SwitchEvent) -> None:
    """Log, as information, what the first step after a switch took to compile again."""
    logger.info("switch %d: compiled again in %.0f ms, after the pause", event.generation, event.recompile_ms or 0.0)
