"""Rows on copies that members keep for each other (`dynatrain.buddies`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

IN_A_FIXED_LAUNCH = Row(
    "buddies in a launch of fixed size",
    Verdict.AT_START,
    "nobody comes or goes there to take over what a dead process held",
    "launch with the dynatrain rendezvous, or leave dynatrain.buddies out and save checkpoints",
    proof="tests/engine/test_buddies.py::test_in_a_launch_of_fixed_size",
)
ROWS = (
    Row(
        "buddies",
        Verdict.NOTE,
        "copies in memory of what one rank holds alone, where members come and go; see [buddies](buddies.md)",
        proof="tests/elastic/test_buddies.py::test_each_copy_is_what_its_rank_held",
    ),
    IN_A_FIXED_LAUNCH,
    Row(
        "several copies of each member",
        Verdict.NOTE,
        "with `copies`, so that as many nodes may die at once",
        proof="tests/elastic/test_buddy_deaths.py::test_two_of_three_that_have_a_state_die",
    ),
    Row(
        "buddies of several engines",
        Verdict.NOTE,
        "copies of all engines of a process are taken at one boundary, and all go back to it together: see "
        "[engines](members.md#where-members-come-and-go)",
        proof="tests/elastic/test_buddy_engines.py::test_both_engines_go_back_to_one_moment",
    ),
)
