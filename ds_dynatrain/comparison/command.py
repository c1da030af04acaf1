"""The command `ds-dynatrain compare`, which measures changes and writes the figures in several formats."""

from __future__ import annotations

import itertools
import signal
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_dynatrain.comparison.job import BEFORE, WAYS, ComparedChange
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.exits import REFUSED, saying

if TYPE_CHECKING:
    from ds_dynatrain.comparison.results import Comparison

CHANGES = ("data=2,zero_stage=1:data=4,zero_stage=1", "data=4,zero_stage=1:data=3,zero_stage=2")
JSON, TABLES, SHORT, PAGE, PICTURE = "compare.json", "compare.md", "short.md", "compare.html", "compare.svg"


class Size(str, Enum):
    """Names of the models that can be trained, as in `job.SHAPES`."""

    TINY = "tiny"
    SMALL = "8M"
    MIDDLE = "30M"
    LARGE = "125M"


class WayName(str, Enum):
    """Names of the ways to carry out a change, as in `job.WAYS`."""

    LIVE = "live"
    GLOO = "live-gloo"
    LATE = "late"
    LEAN = "lean"
    HERE = "here"
    RESTART = "restart"
    DEEPSPEED = "deepspeed"
    DCP = "dcp"


def compare(
    size: Annotated[
        list[Size] | None,
        typer.Option(help="Size of the model; repeatable. Default: all sizes except tiny."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="A change, such as data=4,zero_stage=1:data=3,zero_stage=2; repeatable. Default: two typical changes."
        ),
    ] = None,
    way: Annotated[
        list[WayName] | None,
        typer.Option(help="How to make the change; repeatable. Default: all ways."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare.json, compare.md, compare.html.")] = Path("compare"),
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements of each way; the median is shown.")] = 1,
    limit_seconds: Annotated[float, typer.Option(min=1, help="Time limit of one launch of ranks.")] = 300.0,
    scratch: Annotated[Path | None, typer.Option(help="Folder for checkpoints. Default: the temporary folder.")] = None,
    figures: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing, and draw the results in this compare.json.")
    ] = None,
) -> None:
    """Measure a change made live, and through checkpoints of ds_dynatrain, DeepSpeed and torch, in real processes.

    Takes about forty minutes on two quiet cores, most of it for 125M. Needs DeepSpeed, and matplotlib for the page.
    compare.json is written after every way; --from draws it, even if the rest was never measured.

    Example: ds-dynatrain compare --size 8M --way live --way restart --out compare

    Exit code: 0 if each way was measured or gave the reason why it failed, 1 if no live switch was
    measured, 2 for bad options.
    """
    with saying("compare"):
        try:  # fail before minutes of measuring
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ConfigError("the page needs matplotlib: pip install matplotlib") from error
        if figures is None:
            wanted = [ComparedChange.parse(text) for text in change or CHANGES]
            sizes = size or [each for each in Size if each is not Size.TINY]
            found = measured(sizes, wanted, [*(way or WayName)] * repeats, limit_seconds, scratch, out)
        else:
            found = _read(figures)
        write(found, out)
    typer.echo(f"{out / PAGE}, and beside it the figures as JSON and Markdown")
    if any(each.way.startswith("live") and not each.is_done for each in found.measures):
        raise typer.Exit(REFUSED)


def measured(
    sizes: list[Size],
    changes: list[ComparedChange],
    ways: list[WayName],
    limit_seconds: float,
    scratch: Path | None,
    out: Path,
) -> Comparison:
    """Measure all combinations of sizes, changes and ways (methods), and return the figures.

    Prints progress. After each measurement, writes the figures so far to the folder `out` as JSON.

    limit_seconds: the time limit of one launch.
    scratch: the folder for checkpoints; None for a temporary one.
    out: the folder for the figures.
    """
    from ds_dynatrain.comparison import comparison as measuring
    from ds_dynatrain.comparison.results import Comparison

    found = Comparison(measuring.machine(), " ".join(["ds-dynatrain", *sys.argv[1:]]), BEFORE, ())
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    out.mkdir(parents=True, exist_ok=True)
    try:
        for size, change, way in itertools.product(sizes, changes, (WAYS[each.value] for each in ways)):
            typer.echo(f"{size.value}, {change}: {way.title} ...")
            one = measuring.measure_in(scratch, size.value, change, way, limit_seconds)
            pause = "" if one.pause is None else f", pause {1e3 * one.pause:.0f} ms"
            said = f"{one.total:.2f} s to the end of the first step{pause}, {'' if one.is_equal else 'NOT '}bit-equal"
            typer.echo(f"    {said if one.is_done else f'not possible: {one.reason.splitlines()[0]}'}")
            found = replace(found, measures=(*found.measures, one))
            (out / JSON).write_text(found.to_json(), encoding="utf-8")
        return found
    finally:
        signal.signal(signal.SIGTERM, before)


def _read(path: Path) -> Comparison:
    """Read the figures of an earlier run from its JSON file. Raises ConfigError if the file has none."""
    from ds_dynatrain.comparison.results import Comparison

    try:
        return Comparison.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the {JSON} that an earlier run has written") from error


def write(found: Comparison, folder: Path) -> None:
    """Write the figures to a folder: JSON, two Markdown files, an HTML page, and an SVG chart of the largest model."""
    from ds_dynatrain.comparison import report

    folder.mkdir(parents=True, exist_ok=True)
    files = {JSON: found.to_json(), TABLES: report.document(found), SHORT: report.short(found)}
    files[PAGE] = report.page(found)
    largest = max((found.of(*case) for case in found.cases()), key=report.parameters)
    if any(each.is_done for each in largest.values()):
        files[PICTURE] = '<?xml version="1.0" encoding="utf-8"?>\n' + report.phases(largest, "picture")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
