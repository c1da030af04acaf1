"""Rows on checkpoints that a job saves by itself (`dynatrain.fallback`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

ROWS = (
    Row(
        "fallback checkpoints",
        Verdict.NOTE,
        "saved every so many steps or seconds, after SIGTERM, and where members come and go when training pauses or "
        "all leave; see [checkpoints](checkpoint.md#saved-by-itself)",
    ),
    Row(
        "fallback checkpoints of several engines",
        Verdict.NOTE,
        "each with a folder of its own; where members come and go all need one, and are saved and restored together",
    ),
)
