"""The measurement itself: every way of every change at every size, one after the other."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ds_dynatrain.comparison.assembly import Run, measure
from ds_dynatrain.comparison.job import Change, Task, Way
from ds_dynatrain.comparison.launch import LaunchError, convert, launch
from ds_dynatrain.comparison.results import Comparison, Measure

Say = Callable[[str], None]
Keep = Callable[[Comparison], None]


def compare(
    sizes: Sequence[str],
    changes: Sequence[Change],
    ways: Sequence[Way],
    command: str,
    *,
    repeats: int = 1,
    limit_seconds: float = 300.0,
    scratch: Path | None = None,
    say: Say = lambda line: None,
    keep: Keep = lambda found: None,
) -> Comparison:
    """Measure. A way that fails is a measure with the reason; whatever else goes wrong is raised.

    limit_seconds: of one launch. scratch: where checkpoints are written, on the disk to measure; a temporary folder by
    default. say: called with a line before and after each way. keep: with all that was measured, after each way.
    """
    found: list[Measure] = []
    comparison = Comparison(machine(), command, Task("", "", "", changes[0], "").before, ())
    for size in sizes:
        for change in changes:
            for way in [way for _ in range(repeats) for way in ways]:
                say(f"{size}, {change}: {way.title} ...")
                with tempfile.TemporaryDirectory(prefix="dynatrain-compare-", dir=scratch) as folder:
                    found.append(_one(way, size, change, Path(folder), limit_seconds))
                say(_line(found[-1]))
                comparison = replace(comparison, measures=tuple(found))
                keep(comparison)
    return comparison


def machine() -> str:
    """Where the figures were taken, and how busy it was."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    versions = f"torch {version('torch').partition('+')[0]}, DeepSpeed {version('deepspeed')}"
    python, load = platform.python_version(), os.getloadavg()[0]
    return f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores, {versions}, Python {python}, load {load:.1f}"


def _one(way: Way, size: str, change: Change, folder: Path, limit_seconds: float) -> Measure:
    try:
        return measure(way, _run(way, size, change, folder, limit_seconds))
    except LaunchError as error:
        return Measure(way.name, size, str(change), reason=str(error) or "it failed")
    except KeyError as error:
        return Measure(way.name, size, str(change), reason=f"a rank did not note {error}")


def _run(way: Way, size: str, change: Change, folder: Path, limit_seconds: float) -> Run:
    state = folder / "state"
    state.mkdir()

    def task(part: str) -> Task:
        return Task(way.program, part, size, change, str(state), way.transport, way.safety, way.late)

    if not way.is_restarted:
        whole = launch(task("whole"), change.processes, folder / "whole", limit_seconds)
        return Run(task("whole"), whole, whole)
    old = launch(task("old"), change.source.data, folder / "old", limit_seconds)
    seconds, converter = convert(state, folder / "converter", limit_seconds) if way.converts else (0.0, None)
    new = launch(task("new"), change.target.data, folder / "new", limit_seconds)
    return Run(task("new"), old, new, converter, seconds)


def _line(found: Measure) -> str:
    """A measure in a line."""
    if not found.is_done:
        return f"    not possible: {found.reason.splitlines()[0]}"
    pause = "" if found.pause is None else f", pause {1e3 * found.pause:.0f} ms"
    return f"    {found.total:.2f} s to the end of the first step{pause}, {'' if found.is_equal else 'NOT '}bit-equal"
