"""A summary of a checkpoint's contents, and a check for damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from ds_dynatrain.checkpoint.folder import latest
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import Layout
from ds_dynatrain.terminal import stdout_console

COLUMNS = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
"""Columns of a progress bar that counts bytes."""


def found(path: Path) -> Saved:
    """Open the checkpoint at `path`, or the latest one in a folder. Raises CheckpointError if there is none."""
    return Saved.open(path if (path / "checkpoint.json").exists() else path / latest(path))


def summary(saved: Saved) -> dict[str, Any]:
    """Return a summary of a checkpoint's record and manifest, as plain JSON.

    The summary counts tensors, elements, stored bytes and pieces for each state kind.
    """
    record = saved.record
    kinds: dict[str, dict[str, Any]] = {}
    for row in saved.manifest:
        each = kinds.setdefault(row.kind, {"dtypes": [], "tensors": 0, "elements": 0, "bytes": 0, "pieces": 0})
        each["dtypes"] = sorted({*each["dtypes"], row.dtype})
        each["tensors"] += row.extent.start == 0
        each["elements"] += row.extent.numel
        each["bytes"] += row.nbytes if row.file else 0
        each["pieces"] += 1
    files = sorted({row.file for row in saved.manifest if row.file})
    return {
        "path": str(saved.path),
        "step": record.step,
        "layout": record.layout,
        "ranks": record.world.world_size,
        "written_by": record.written_by,
        "converted_from": record.converted_from,
        "parameters": len(record.tensors),
        "kinds": kinds,
        "files": {name: (saved.path / name).stat().st_size for name in files},
    }


def show(said: dict[str, Any]) -> None:
    """Print the result of `summary`: a heading, a table of the state kinds, and the total size."""
    console = stdout_console()
    how = (
        f"converted from {said['converted_from']}"
        if said["converted_from"]
        else f"saved in {Layout.from_dict(said['layout'])}"
    )
    console.print(f"[bold]{said['path']}[/]\nstep {said['step']}, {how} by {said['written_by']}")
    table = Table(box=None, header_style="bold")
    for name in ("kind", "type", "tensors", "elements", "bytes", "pieces"):
        table.add_column(name, justify="left" if name in ("kind", "type") else "right")
    for kind, each in said["kinds"].items():
        numbers = [f"{each[name]:,}" for name in ("tensors", "elements", "bytes", "pieces")]
        table.add_row(kind, " ".join(each["dtypes"]), *numbers)
    console.print(table)
    total = sum(said["files"].values())
    console.print(f"{len(said['files'])} data files, {total:,} bytes")


def damage(saved: Saved) -> Iterator[str]:
    """Read a whole checkpoint, and yield a line for each part that differs from what was saved.

    Shows a progress bar on the terminal.
    """
    stored = [row for row in saved.manifest if row.file]
    for rank in range(saved.record.world.world_size):
        try:
            saved.of_rank(rank)
        except CheckpointDamaged as error:
            yield str(error)
    with Reader(saved.path, saved.manifest) as reader, Progress(*COLUMNS, transient=True) as bar:
        task = bar.add_task("checking", total=sum(row.nbytes for row in stored))
        for row in stored:
            try:
                if not reader.is_sound(row):
                    yield f"{row}: not what was saved"
            except (CheckpointError, OSError) as error:
                yield f"{row}: {error}"
            bar.advance(task, row.nbytes)
    for tensor, kind in saved.manifest.rows:
        try:
            saved.manifest.runs(tensor, kind)
        except CheckpointDamaged as error:
            yield str(error)
