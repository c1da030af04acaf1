"""Events in a file: one line of JSON each, appended, so that a run has one file however often its rank 0 changes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_dynatrain.report.event import SwitchEvent

_LATER = {"recompile": "recompile_ms", "gain": "measured_gain"}
"""Fields of an event that become known only after it was written, by the kind of the line that adds them."""


@dataclass(frozen=True)
class EventWriter:
    """Writer that appends events to the file at `path`, and makes its folder.

    No file stays open between two events. The present rank 0 writes; the next one goes on in the same file.
    """

    path: Path

    def write(self, event: SwitchEvent) -> None:
        """Append one event; it is in the file when this returns. Raises `OSError` if that fails."""
        self.write_line(event.to_json())

    def write_recompile(self, event: SwitchEvent) -> None:
        """Append an event's time of recompilation, known only after the next step: `{"event": "recompile", ...}`."""
        self._write_later("recompile", event)

    def write_gain(self, event: SwitchEvent) -> None:
        """Append an event's measured gain, known only after a later window: `{"event": "gain", ...}`."""
        self._write_later("gain", event)

    def _write_later(self, kind: str, event: SwitchEvent) -> None:
        record = {"event": kind, "generation": event.generation, _LATER[kind]: getattr(event, _LATER[kind])}
        self.write_line(json.dumps(record, separators=(",", ":")))

    def write_line(self, line: str) -> None:
        """Append one line; extensions pass JSON with an "event" of their own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_events(path: str | Path) -> list[SwitchEvent]:
    """Return the events of a file in the order in which they were written; raises `ValueError` with the bad line.

    Lines that add later values go into their events; lines of extensions are skipped.
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


def _add_later(name: str, record: dict[str, Any], events: list[SwitchEvent]) -> None:
    """Add a later value to the last event of its generation."""
    for place in reversed(range(len(events))):
        if events[place].generation == record.get("generation"):
            changes: dict[str, Any] = {name: record.get(name)}
            events[place] = replace(events[place], **changes)
            return
    raise ValueError(f"a {record['event']} line of a switch that is not in the file: {json.dumps(record)[:80]!r}")
