"""Rows on copies that members keep for each other (`dynatrain.buddies`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

IN_A_FIXED_LAUNCH = Row(
    "buddies in a launch of fixed size",
    Verdict.AT_START,
    "nobody comes or goes there to take over what a dead process held",
    "launch with the dynatrain rendezvous, or leave dynatrain.buddies out and save checkpoints",
)
ROWS = (
    Row(
        "buddies",
        Verdict.NOTE,
        "copies in memory of what one rank holds alone, where members come and go; see [buddies](buddies.md)",
    ),
    IN_A_FIXED_LAUNCH,
    Row(
        "several copies of each member",
        Verdict.NOTE,
        "with `copies`, so that as many nodes may die at once",
    ),
    Row(
        "buddies of several engines",
        Verdict.NOTE,
        "copies of all engines of a process are taken at one boundary, and all go back to it together: see "
        "[engines](members.md#where-members-come-and-go)",
    ),
)
