"""The support table: what works in a job that switches; what is refused, when, why, and what to do about it.

The rows are data and need neither torch nor DeepSpeed. `adapters/deepspeed/support_checks.py` applies them to live
objects. When the verdict on a feature changes, its row changes. `docs/support.md` is made from the rows (`markdown`).

| file | contents |
|---|---|
| `row` `keys` `usage` | a row; the rows of the configuration's keys; the rows of uses outside the configuration |
| `checks` | conditions of rows on more than one key, or on the layout |
| `walk` | all rows; checks a configuration against them |
| `axes` | rules on combinations of axes and ZeRO stages, from `docs/dev/feasibility.md` |
| `proved` | not rows: what ran on which accelerator |

This package may import only `space` and `extension`. Begin reading at `row`.
"""

from ds_dynatrain.support.keys import CONFIG_TABLES
from ds_dynatrain.support.row import Refusal, Row, Target, Verdict
from ds_dynatrain.support.walk import Finding, all_tables, examine, refuse_config, refuse_layout, row_of, usage

__all__ = [
    "CONFIG_TABLES",
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
