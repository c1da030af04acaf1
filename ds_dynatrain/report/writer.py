"""Reading and writing of event files, to which each event is appended as one line of JSON.

A run has one file, no matter how often its rank 0 changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_dynatrain.report.event import SwitchEvent

_LATER = {"recompile": ("recompile_ms",), "gain": ("measured_gain", "slowdown_removed")}
"""Fields of a switch that become known only after its event was written. Each is keyed by the "event" of the line that
adds it."""


@dataclass(frozen=True)
class EventWriter:
    """A writer that appends events to the file at `path`, and creates the file's folder if needed.

    The file is closed after each event. The current rank 0 writes; the next rank 0 continues the same file.
    """

    path: Path

    def write(self, event: SwitchEvent) -> None:
        """Append one event to the file. Raises `OSError` if writing fails."""
        self.write_line(event.to_json())

    def write_recompile(self, event: SwitchEvent) -> None:
        """Append a line `{"event": "recompile", ...}` with a switch's recompilation time, which is known only after the
        next step."""
        self._write_later("recompile", event)

    def write_gain(self, event: SwitchEvent) -> None:
        """Append a line `{"event": "gain", ...}` with a switch's measured gain and the share of a slow-down removed,
        which are known only after a later window."""
        self._write_later("gain", event)

    def _write_later(self, kind: str, event: SwitchEvent) -> None:
        later = {name: getattr(event, name) for name in ("generation", *_LATER[kind])}
        self.write_line(json.dumps({"event": kind, **later}, separators=(",", ":")))

    def write_line(self, line: str) -> None:
        """Append one line of JSON. Lines that extensions write have an "event" of their own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_events(path: str | Path) -> list[SwitchEvent]:
    """Return the switches in a file in the order in which they were written.

    Values added by later lines are merged into their switches, and lines of extensions are skipped. Raises `ValueError`
    with the number of an invalid line.
    """
    events: list[SwitchEvent] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            kind = record.get("event") if isinstance(record, dict) else None
            if isinstance(kind, str) and kind in _LATER:
                _add_later(_LATER[kind], record, events)
            elif kind == "switch" or not isinstance(kind, str):
                events.append(SwitchEvent.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return events


def _add_later(names: Sequence[str], record: dict[str, Any], events: list[SwitchEvent]) -> None:
    """Find the last event of the record's generation, and copy the fields `names` from the record into it.

    Raises `ValueError` if there is no such event.
    """
    wanted = record.get("generation")
    place = next((at for at in reversed(range(len(events))) if events[at].generation == wanted), None)
    if place is None:
        raise ValueError(f"a {record['event']} line of a switch that is not in the file: {json.dumps(record)[:80]!r}")
    changes: dict[str, Any] = {name: record.get(name) for name in names}
    events[place] = replace(events[place], **changes)
