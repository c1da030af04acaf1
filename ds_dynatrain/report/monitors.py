"""Rows about switches for DeepSpeed's monitors: TensorBoard, W&B, csv."""

from __future__ import annotations

from ds_dynatrain.report.event import SwitchEvent

Row = tuple[str, float, int]
"""A name, a value, and the number of samples trained so far (the x-axis), like DeepSpeed's own rows."""


def metrics(event: SwitchEvent) -> dict[str, float]:
    """Return the numbers of a switch by name. A switch that was not committed has only its outcome and its pause."""
    is_committed = event.outcome == "committed"
    values: dict[str, float] = {"committed": float(is_committed), "pause_ms": event.pause_ms}
    if is_committed:
        values |= {
            "world_size": len(event.target.members),
            "zero_stage": event.target.layout["zero_stage"],
            "sent_bytes": event.bytes_sent,
        }
    return values


def rows(event: SwitchEvent, samples: int) -> list[Row]:
    """Return the rows of a switch.

    samples: number of samples trained before the switch.
    """
    return [(f"Dynatrain/{name}", value, samples) for name, value in metrics(event).items()]
