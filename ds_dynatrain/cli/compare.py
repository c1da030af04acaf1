"""`ds-dynatrain compare`: measure changes, and write the figures in four forms."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ds_dynatrain.comparison import markdown
from ds_dynatrain.comparison.comparison import compare
from ds_dynatrain.comparison.job import WAYS, Change
from ds_dynatrain.comparison.results import Comparison, way_of
from ds_dynatrain.errors import ConfigError

SIZES = ("8M", "30M", "125M")
CHANGES = ("data=2,zero_stage=1:data=4,zero_stage=1", "data=4,zero_stage=1:data=3,zero_stage=2")
JSON, TABLES, SHORT, PAGE, PICTURE = "compare.json", "compare.md", "short.md", "compare.html", "compare.svg"


def measure(
    sizes: Sequence[str],
    changes: Sequence[str],
    ways: Sequence[str],
    repeats: int,
    limit_seconds: float,
    scratch: Path | None,
    folder: Path,
) -> Comparison:
    """Measure the changes, print a line for each way, and keep the figures so far as JSON in the folder.

    ConfigError for a change or way that does not exist.
    """
    check_drawing()
    wanted = [way_of(name) for name in ways] or list(WAYS)
    parsed = [Change.parse(text) for text in changes or CHANGES]
    console, command = Console(highlight=False, soft_wrap=True), " ".join(["ds-dynatrain", *sys.argv[1:]])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    try:
        return compare(
            sizes or SIZES,
            parsed,
            wanted,
            command,
            repeats=repeats,
            limit_seconds=limit_seconds,
            scratch=scratch,
            keep=lambda found: _keep(found, folder),
            say=lambda line: console.print(line, markup=False),
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def read(path: Path) -> Comparison:
    """Return the figures of an earlier run; ConfigError if the file has none."""
    check_drawing()
    try:
        return Comparison.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the {JSON} that an earlier run has written") from error


def write(found: Comparison, folder: Path) -> None:
    """Write figures as JSON, as Markdown, as the page, and the largest case alone as a picture."""
    from ds_dynatrain.comparison import charts
    from ds_dynatrain.comparison.page import page

    folder.mkdir(parents=True, exist_ok=True)
    files = {JSON: found.to_json(), TABLES: markdown.document(found), SHORT: markdown.short(found), PAGE: page(found)}
    largest = max(found.cases(), key=lambda case: max(each.parameters for each in found.of(*case).values()))
    if any(each.is_done for each in found.of(*largest).values()):
        files[PICTURE] = '<?xml version="1.0" encoding="utf-8"?>\n' + charts.phases(found, *largest, "picture")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _keep(found: Comparison, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(found.to_json(), encoding="utf-8")


def check_drawing() -> None:
    """Raise ConfigError before minutes of measuring if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("the page needs matplotlib: pip install matplotlib") from error
