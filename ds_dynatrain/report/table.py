"""A table of switches for a terminal, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from ds_dynatrain.report.event import SwitchEvent

_NUMBERS = ("pause,\nproof ms", "sent,\nleast MB", "peak\nMB")


def table(events: Iterable[SwitchEvent]) -> Table:
    """Return a table with one row per switch, to print with `rich.print`.

    The columns are: the step at which the switch took effect; the layouts before and after; the members that train
    after it; the pause and, below it, the part that the certificate took; bytes sent and, below them, the fewest
    possible; the most memory that a member held; the outcome. The reasons of switches that were not committed follow
    below the table.
    """
    made = Table(title="Switches", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    made.title_justify = made.caption_justify = "left"
    made.add_column("step", justify="right", no_wrap=True)
    made.add_column("switch", no_wrap=True)
    made.add_column("members", overflow="fold", min_width=7)
    for name in _NUMBERS:
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    reasons: list[str] = []
    for event in events:
        made.add_row(
            str(event.step),
            f"{event.source.describe()}\n-> {event.target.describe()}",
            ",".join(map(str, event.target.members)),
            f"{event.pause_ms:.0f}\n{event.certificate_ms:.0f}",
            f"{event.bytes_sent / 1e6:.1f}\n{event.bytes_least / 1e6:.1f}",
            f"{event.peak_memory_bytes / 1e6:.1f}",
            event.outcome.replace("_", " "),
        )
        if event.reason:
            reasons.append(f"step {event.step}: {event.reason}")
    made.caption = "\n".join(reasons) or None
    return made
