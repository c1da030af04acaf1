"""Rows of the support table about the clocks of members that wait (`dynatrain.clocks`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

BESIDE_MOVES = Row(
    "clocks beside layers that move",
    Verdict.AT_START,
    "at lowered clocks a slow stage does not look slow",
    'set dynatrain.balance.mode to "advise", and move layers first',
)
BESIDE_ANOTHER_ENGINE = Row(
    "clocks beside another engine of the process",
    Verdict.AT_START,
    "one device has one clock, and only one engine's waiting is measured",
    "leave dynatrain.clocks out of all engines of the process",
)
ROWS = (
    Row(
        "clocks",
        Verdict.NOTE,
        "members that wait get the lowest clock at which they do not limit the step; see [clocks](gpu.md#clocks)",
    ),
    BESIDE_MOVES,
    BESIDE_ANOTHER_ENGINE,
)
