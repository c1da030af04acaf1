"""What works in a job that switches, what is refused, when, why, and what to do about it: one table.

The rows are data and need neither torch nor DeepSpeed; `adapters/support.py` applies them to live objects. A feature
that changes its verdict changes its row. `docs/support-*.md` are made from them.

| file | rows of |
|---|---|
| `general` | batches, reports, checkpoints, what DeepSpeed has removed |
| `optimizers`, `precision`, `zero`, `features` | their sections of the configuration |
| `usage` | what users do around the configuration |
| `checks` | conditions of rows on more than one key, or on the layout |
| `axes` | rules on the combinations of axes and stages, of `docs/feasibility.md` |
| `proved` | not rows: what ran on which accelerator |
| `row`, `tables`, `walk` | a row; all of them; a configuration against them |
"""

from ds_dynatrain.support.row import Refusal, Row, Target, Verdict
from ds_dynatrain.support.tables import CONFIG_TABLES, TABLES, all_tables, usage
from ds_dynatrain.support.walk import Finding, examine, refuse_config, refuse_layout, row_of

__all__ = [
    "CONFIG_TABLES",
    "TABLES",
    "Finding",
    "Refusal",
    "Row",
    "Target",
    "Verdict",
    "all_tables",
    "examine",
    "refuse_config",
    "refuse_layout",
    "row_of",
    "usage",
]
