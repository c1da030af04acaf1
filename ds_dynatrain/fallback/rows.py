"""Rows of the support table about checkpoints that a job saves automatically (`dynatrain.fallback`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

ROWS = (
    Row(
        "fallback checkpoints",
        Verdict.NOTE,
        "saved at an interval and after SIGTERM; in an elastic job also when training pauses or all members leave; "
        "see [checkpoints](checkpoint.md#saved-by-itself)",
    ),
    Row(
        "fallback checkpoints of several engines",
        Verdict.NOTE,
        "each engine needs its own folder; in an elastic job every engine needs one, and all are saved and restored "
        "together",
    ),
)
