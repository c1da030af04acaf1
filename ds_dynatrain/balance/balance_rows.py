"""The row of the table of features for timing layers and members (`dynatrain.balance`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

ROWS = (
    Row(
        "balance",
        Verdict.NOTE,
        "times the layers of a PipelineModule and the members of any model, and with mode act moves work away from "
        "slow ones: see [balance](balance.md#in-a-job)",
    ),
)
