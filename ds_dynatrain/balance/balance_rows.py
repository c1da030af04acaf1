"""The row of the table of features for timing layers and members (`dynatrain.balance`)."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

ROWS = (
    Row(
        "balance",
        Verdict.NOTE,
        "layers of a PipelineModule and the members of any model are timed, and with mode act move to where the time "
        "is: see [balance](balance.md#in-a-job)",
    ),
)
