"""All rows, table by table, as the docs show them; and the same by key."""

from __future__ import annotations

from collections.abc import Mapping

from ds_dynatrain import extension
from ds_dynatrain.support.features import FEATURES, PARALLELISM
from ds_dynatrain.support.general import BATCHES, CHECKPOINTS, REMOVED, REPORTS
from ds_dynatrain.support.optimizers import OPTIMIZERS, SCHEDULERS
from ds_dynatrain.support.precision import PRECISION
from ds_dynatrain.support.row import Row
from ds_dynatrain.support.usage import USAGE
from ds_dynatrain.support.zero import OFFLOAD, ZERO

CONFIG_TABLES: Mapping[str, tuple[Row, ...]] = {
    "batches": BATCHES,
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "precision": PRECISION,
    "zero": ZERO,
    "offload": OFFLOAD,
    "features": FEATURES,
    "parallelism": PARALLELISM,
    "reports": REPORTS,
    "checkpoints": CHECKPOINTS,
    "removed": REMOVED,
}
"""Keys of DeepSpeed's configuration."""
TABLES: Mapping[str, tuple[Row, ...]] = {**CONFIG_TABLES, "usage": USAGE}
"""Every row but those of extensions, under the name that the docs use for its table."""


def _by_key(tables: Mapping[str, tuple[Row, ...]]) -> dict[str, tuple[Row, ...]]:
    found: dict[str, tuple[Row, ...]] = {}
    for rows in tables.values():
        for row in rows:
            found[row.key] = (*found.get(row.key, ()), row)
    return found


CONFIG_ROWS: Mapping[str, tuple[Row, ...]] = _by_key(CONFIG_TABLES)
"""The rows of each key of the configuration."""
_USAGE = {row.key: row for row in USAGE}


def all_tables() -> dict[str, tuple[Row, ...]]:
    """Return every row, of extensions too, under the name of its table; for documentation."""
    return {**TABLES, **extension.rows()}


def usage(name: str) -> Row:
    """The row of what users do around DeepSpeed's configuration; KeyError if there is none."""
    return _USAGE[name]
