"""Measurement of all combinations of model size, change and way, one after the other, in ranks started by torchrun.

Each measure is computed from the notes that the ranks write. If this process stops waiting for a launch of ranks, it
ends the launch.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from ds_dynatrain.comparison.job import AFTER, BATCH, BEFORE, LEAD, ComparedChange, Task, Way
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.results import Comparison, Measure
from ds_dynatrain.errors import DynatrainError
from ds_dynatrain.records import to_record

ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
}
"""Environment variables of the ranks. The user's own settings take precedence.

Several ranks share the cores, and the comparison runs on the CPU.
"""
END_SECONDS = 10.0
WARM = 2
"""Number of steps at the start of a layout that do not count as steady."""


class LaunchError(DynatrainError):
    """Raised if a launch ended with an error or not in time. The message is the first error that a rank recorded."""


@dataclass(frozen=True)
class Launched:
    """A finished launch of ranks.

    at: the time at which the launch began, by the machine's clock.
    end: the time at which the launch ended, by the machine's clock.
    notes: the notes of the launch's ranks, keyed by member.
    """

    at: float
    end: float
    notes: Mapping[int, Notes]


def launch(task: Task, notes: Path, limit_seconds: float) -> Launched:
    """Launch the ranks of a task, and return their notes. Raises LaunchError, with the reason, if the launch fails.

    notes: the folder for the notes, which must not exist yet.
    """
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={task.processes}", "-m"]
    command += ["ds_dynatrain.comparison.worker", str(notes), json.dumps(to_record(task))]
    return _launched(command, notes, limit_seconds, f"{task.way.name}, {task.part}, {task.processes} ranks")


def _launched(module: Sequence[str], notes: Path, limit_seconds: float, what: str) -> Launched:
    """Run a Python module that writes notes, and return the notes. Raises LaunchError, with the reason, if it fails.

    module: the module's name and its arguments.
    notes: the folder for the notes.
    what: a description of the run for error messages.
    """
    notes.mkdir(parents=True)
    begin, output = time.monotonic(), notes / "output"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            env={**ENVIRONMENT, **os.environ},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{what}: not done after {limit_seconds:.0f} s; give a larger --limit-seconds") from None
        finally:
            _end(process)
    end, read = time.monotonic(), Notes.all_of(notes)
    if status:
        errors = [rank.error for rank in read.values() if rank.error]
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        silent = f"{what}: exit status {status} without a word; look for the kernel's killer in dmesg"
        raise LaunchError(next(iter([*errors, *lines[-1:]]), "") or silent)
    return Launched(begin, end, read)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launch, and all processes of its session that are still running."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True)
class Run:
    """The launches that carried out one change.

    old: the launch before the change.
    new: the launch after the change; the same object as `old` if the processes keep running through the change.
    converter: the run of the converter in between, if any.
    """

    task: Task
    old: Launched
    new: Launched
    converter: Launched | None = None

    @property
    def launches(self) -> list[Launched]:
        """The one or two launches that trained, without the converter."""
        return [self.old] if self.old is self.new else [self.old, self.new]


def measure(run: Run) -> Measure:
    """Return the measure of a finished run.

    Raises KeyError, with the name of a note, if a rank did not write the note.
    """
    first, last, task = run.old.notes[0], run.new.notes[0], run.task
    phases, total = _phases(run, first, last)
    phases["rest"] = total - sum(phases.values())
    ranks = run.new.notes.values()
    switches = [switch for rank in ranks for switch in rank.switches]
    going_on = [rank.switches[-1] for rank in ranks if BEFORE + 1 in rank.steps and rank.switches]
    everyone = [rank for each in (*run.launches, run.converter) if each is not None for rank in each.notes.values()]
    seen = {number for rank in ranks if (step := rank.steps.get(last.resumed + 1)) for number in step.samples}
    wanted = range(BEFORE * BATCH, (BEFORE + 1) * BATCH)
    digests = [
        {rank.digests[when] for rank in each.notes.values() if when in rank.digests}
        for each, when in ((run.old, "before"), (run.new, "after"))
    ]
    return Measure(
        way=task.way.name,
        size=task.size,
        change=str(task.change),
        parameters=first.parameters,
        phases={name: seconds for name, seconds in phases.items() if seconds > 0},
        total=total,
        steady=_median_step(last, BEFORE + WARM + 1, BEFORE + AFTER),
        pause=max((each.pause for each in going_on), default=None),
        certificate=max((each.certificate for each in going_on), default=None),
        wait=max((each.wait for each in going_on), default=0.0),
        ahead=_ahead(first) if switches else None,
        moved=max((each.sent for each in switches), default=0),
        written=sum(file.lstat().st_size for file in Path(task.folder).rglob("*") if file.is_file()),
        peak=max(rank.peak for rank in everyone),
        steps_lost=BEFORE - last.resumed,
        samples_lost=len({*wanted} - seen),
        samples_repeated=len([number for number in seen if number < wanted.start]),
        is_equal=digests[0] == digests[1] and len(digests[0]) == 1,
        losses=_losses(run),
        reason=next((each.failed for each in switches if each.failed), ""),
    )


def _phases(run: Run, first: Notes, last: Notes) -> tuple[dict[str, float], float]:
    """Return a map from each phase to its seconds, and the total seconds.

    first: the notes of rank 0 before the change.
    last: the notes of rank 0 after the change.
    """
    new_step = last.stamps["end"] - last.stamps["resume"] - last.apart
    if run.old is run.new:
        phases = {name: seconds for name, seconds in last.phases.items() if name != "import"}
        phases["first step"] -= last.apart + last.waited
        return phases, last.stamps["ready"] - first.stamps["begin"] + new_step
    convert = 0.0 if run.converter is None else run.converter.end - run.converter.at
    phases = {"save": first.phases["save"], "convert": convert, "start": last.stamps["started"] - run.new.at}
    old_part = first.stamps["saved"] - first.stamps["begin"]
    return {**phases, **last.phases}, old_part + convert + last.stamps["ready"] - run.new.at + new_step


def _ahead(rank: Notes) -> float:
    """Return the total number of seconds by which the request slowed down the steps from itself to the change."""
    plain, asked = _median_step(rank, WARM + 1, BEFORE - LEAD), range(BEFORE - LEAD + 1, BEFORE + 1)
    return max(0.0, sum(rank.steps[number].seconds - plain for number in asked))


def _median_step(rank: Notes, first: int, last: int) -> float:
    return median(rank.steps[number].seconds for number in range(first, last + 1) if number in rank.steps)


def _losses(run: Run) -> dict[int, float]:
    """Return a map from step number to loss, as the mean over ranks, which have equal shares of the batch."""
    found: dict[int, list[float]] = {}
    for rank in (rank for launched in run.launches for rank in launched.notes.values()):
        for number, step in rank.steps.items():
            found.setdefault(number, []).append(mean(step.losses))
    return {number: mean(found[number]) for number in sorted(found)}


def compare(
    sizes: Sequence[str],
    changes: Sequence[ComparedChange],
    ways: Sequence[Way],
    command: str,
    limit_seconds: float,
    scratch: Path | None,
    say: Callable[[str], None],
) -> Iterator[Comparison]:
    """Measure every way (method) of carrying out every change at every size. After each, yield all measures so far.

    If a launch fails, its measure contains the reason. Other errors are raised.

    command: the user's command, which is recorded.
    limit_seconds: the time limit of one launch.
    scratch: a folder for checkpoints, on the disk to measure; None for the system's temporary folder.
    say: called with a line of text before and after each measurement.
    """
    found = Comparison(machine(), command, BEFORE, ())
    for size, change, way in ((size, change, way) for size in sizes for change in changes for way in ways):
        say(f"{size}, {change}: {way.title} ...")
        with tempfile.TemporaryDirectory(prefix="dynatrain-compare-", dir=scratch) as folder:
            one = _one(way, size, change, Path(folder), limit_seconds)
        say(_line(one))
        found = replace(found, measures=(*found.measures, one))
        yield found


def machine() -> str:
    """Return a description of this machine: processor, cores, software versions, and current load."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.machine())
    versions = f"torch {version('torch').partition('+')[0]}, DeepSpeed {version('deepspeed')}"
    python, load = platform.python_version(), os.getloadavg()[0]
    return f"{name}, {os.cpu_count()} cores, {versions}, Python {python}, load {load:.1f}"


def _one(way: Way, size: str, change: ComparedChange, folder: Path, limit_seconds: float) -> Measure:
    try:
        return measure(_run(way, size, change, folder, limit_seconds))
    except LaunchError as error:
        return Measure(way.name, size, str(change), reason=str(error) or "it failed")
    except KeyError as error:
        return Measure(way.name, size, str(change), reason=f"a rank did not note {error}")


def _run(way: Way, size: str, change: ComparedChange, folder: Path, limit_seconds: float) -> Run:
    state, converter = folder / "state", None
    state.mkdir()
    whole, old, new = (Task(way, part, size, change, str(state)) for part in ("whole", "old", "new"))
    if not way.is_restarted:
        through = launch(whole, folder / "whole", limit_seconds)
        return Run(whole, through, through)
    before = launch(old, folder / "old", limit_seconds)
    if way.converts:
        notes = folder / "converter"
        module = ["ds_dynatrain.comparison.converter", str(state), str(notes)]
        converter = _launched(module, notes, limit_seconds, "the converter")
    return Run(new, before, launch(new, folder / "new", limit_seconds), converter)


def _line(found: Measure) -> str:
    """Return one line of text about a measure."""
    if not found.is_done:
        return f"    not possible: {found.reason.splitlines()[0]}"
    pause = "" if found.pause is None else f", pause {1e3 * found.pause:.0f} ms"
    return f"    {found.total:.2f} s to the end of the first step{pause}, {'' if found.is_equal else 'NOT '}bit-equal"
