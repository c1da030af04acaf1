"""Events in a file: one line of JSON each, appended, so that a run leaves one file however often its rank 0 changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_dynatrain.report.event import SwitchEvent


@dataclass(frozen=True)
class EventWriter:
    """Appends events to the file at `path`; its folder is made if it is not there.

    No file stays open between two events. The rank 0 of a moment writes; the next one goes on in the same file.
    """

    path: Path

    def write(self, event: SwitchEvent) -> None:
        """Append one event; it is in the file when this returns. Raises `OSError` where that fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(event.to_json() + "\n")


def read_events(path: str | Path) -> list[SwitchEvent]:
    """Return the events of a file in the order in which they were written; raises `ValueError` with the bad line."""
    events: list[SwitchEvent] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            events.append(SwitchEvent.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return events
