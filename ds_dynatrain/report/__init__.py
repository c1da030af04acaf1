"""Reports of switches: each switch has an event, which is shown as a log line, as a line of JSON and in a table.

This package needs neither torch nor DeepSpeed, so reports can be read on any machine.

This package may import only `space`. Begin reading at `event`.
"""

from __future__ import annotations

from ds_dynatrain.report.event import CertificateSummary, Outcome, Side, SwitchEvent
from ds_dynatrain.report.log import (
    log_event,
    log_gain,
    log_recompile,
    logger,
    show_by_default,
    telling_if_long,
)
from ds_dynatrain.report.writer import EventWriter, read_events

__all__ = [
    "CertificateSummary",
    "EventWriter",
    "Outcome",
    "Side",
    "SwitchEvent",
    "log_event",
    "log_gain",
    "log_recompile",
    "logger",
    "read_events",
    "show_by_default",
    "telling_if_long",
]
