"""Checkpoints of ours as a stranger makes them: whatever they say, all sums are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ds_dynatrain.checkpoint import record
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.cli.main import app

FORMATS = ("safetensors", "deepspeed-universal", "dcp")


def rewritten(path: Path, change: Callable[[Any], object] = lambda said: None) -> None:
    """Change what the record says, and make all sums and sizes right."""
    said = json.loads((path / record.RECORD).read_text())
    said.pop("sum", None)
    change(said)
    if isinstance(said.get("sums"), dict):
        there = {each.name for each in path.iterdir()} & {*said["sums"]}
        said["sums"].update({name: record.sum_of((path / name).read_bytes()) for name in there})
    said["sum"] = record.sum_of(json.dumps(said, sort_keys=True).encode())
    (path / record.RECORD).write_text(json.dumps(said))


def with_rows(path: Path, change: Callable[[ManifestRow], ManifestRow | None]) -> None:
    """Change or leave out rows of the manifest; call `rewritten` afterwards."""
    rows = [row for row in map(change, Saved.open(path).manifest) if row is not None]
    (path / record.MANIFEST).write_bytes(Manifest.of(rows).to_bytes())


def checkpoint(*arguments: object) -> tuple[int, str]:
    """`ds-dynatrain checkpoint ...`: (exit code, what it says, as one line); an exception is raised as it is."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())
