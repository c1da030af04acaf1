"""Rows of the support table about copies that members keep for each other (`dynatrain.buddies`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

IN_A_FIXED_LAUNCH = Row(
    "buddies in a launch of fixed size",
    Verdict.AT_START,
    "no process could take over the state of a dead one",
    "launch with the dynatrain rendezvous, or leave dynatrain.buddies out and save checkpoints",
)
ROWS = (
    Row(
        "buddies",
        Verdict.NOTE,
        "in an elastic job, other members keep copies in memory of state that only one rank holds; see "
        "[buddies](buddies.md)",
    ),
    IN_A_FIXED_LAUNCH,
    Row(
        "several copies of each member",
        Verdict.NOTE,
        "set `copies` to the number of nodes that may die at once",
    ),
    Row(
        "buddies of several engines",
        Verdict.NOTE,
        "all engines of a process copy at one boundary, and all go back to it together: see "
        "[engines](members.md#where-members-come-and-go)",
    ),
)
