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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from ds_dynatrain.comparison.job import AFTER, BATCH, BEFORE, LEAD, ComparedChange, Task, Way
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.results import Measure
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
    """A finished launch of ranks: when it began, by the machine's clock, and its ranks' notes, keyed by member."""

    at: float
    notes: Mapping[int, Notes]


def launch(task: Task, notes: Path, limit_seconds: float) -> Launched:
    """Launch the ranks of a task, and return their notes. Raises LaunchError, with the reason, if the launch fails.

    notes: the folder for the notes, which must not exist yet.
    """
    what = f"{task.way.name}, {task.part}, {task.processes} ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={task.processes}"]
    command += ["-m", "ds_dynatrain.comparison.worker", str(notes), json.dumps(to_record(task))]
    notes.mkdir(parents=True)
    begin, output = time.monotonic(), notes / "output"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
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
    read = Notes.all_of(notes)
    if status:
        errors = [rank.error for rank in read.values() if rank.error]
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        silent = f"{what}: exit status {status} without a word; look for the kernel's killer in dmesg"
        raise LaunchError(next(iter([*errors, *lines[-1:]]), "") or silent)
    return Launched(begin, read)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launch, and all processes of its session that are still running."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(task: Task, launches: Sequence[Launched]) -> Measure:
    """Compute the measure of a change from the notes that the ranks wrote.

    launches: the launch before the change and the one after it, with the converter's launch in between if there is one;
        a single launch if the processes keep running through the change.

    Raises KeyError, with the name of a note, if a rank did not write the note.
    """
    old, new = launches[0], launches[-1]
    first, last = old.notes[0], new.notes[0]
    phases = {name: seconds for each in launches for name, seconds in each.notes[0].phases.items()}
    if old is new:
        phases.pop("import")
        begun = first.stamps["begin"]
    else:
        phases["start"] = last.stamps["started"] - new.at
        begun = new.at - phases.get("convert", 0.0) - first.stamps["saved"] + first.stamps["begin"]
    total = last.stamps["ready"] - begun + phases["first step"] + last.waited
    phases["rest"] = total - sum(phases.values())
    ranks = [rank for each in launches for rank in each.notes.values()]
    switches = [rank.switch for rank in ranks if rank.switch is not None]
    going_on = [rank.switch for rank in ranks if BEFORE + 1 in rank.steps and rank.switch is not None]
    first_steps = [rank.steps[last.resumed + 1] for rank in new.notes.values() if last.resumed + 1 in rank.steps]
    seen, wanted = (
        {number for step in first_steps for number in step.samples},
        range(BEFORE * BATCH, (BEFORE + 1) * BATCH),
    )
    before, after = (
        {rank.digests[when] for rank in each.notes.values() if when in rank.digests}
        for each, when in ((old, "before"), (new, "after"))
    )
    losses: dict[int, list[float]] = {}
    for rank in ranks:  # all ranks have equal shares of the batch
        for number, step in rank.steps.items():
            losses.setdefault(number, []).append(mean(step.losses))
    return Measure(
        way=task.way.name,
        size=task.size,
        change=str(task.change),
        parameters=first.parameters,
        phases={name: seconds for name, seconds in phases.items() if seconds > 0},
        total=total,
        steady=_median_step(last, BEFORE + WARM + 1, BEFORE + AFTER),
        pause=max((each.pause_ms / 1e3 for each in going_on), default=None),
        certificate=max((each.certificate_ms / 1e3 for each in going_on), default=None),
        wait=max((each.late_wait_ms / 1e3 for each in going_on), default=0.0),
        ahead=_ahead(first) if switches else None,
        moved=max((each.bytes_sent for each in switches), default=0),
        written=sum(file.lstat().st_size for file in Path(task.folder).rglob("*") if file.is_file()),
        peak=max(rank.peak for rank in ranks),
        steps_lost=BEFORE - last.resumed,
        samples_lost=len({*wanted} - seen),
        samples_repeated=len([number for number in seen if number < wanted.start]),
        is_equal=before == after and len(before) == 1,
        losses={number: mean(losses[number]) for number in sorted(losses)},
        reason=next((each.reason for each in switches if each.outcome != "committed"), ""),
    )


def _ahead(rank: Notes) -> float:
    """Return the total number of seconds by which the request slowed down the steps between it and the change."""
    plain, asked = _median_step(rank, WARM + 1, BEFORE - LEAD), range(BEFORE - LEAD + 1, BEFORE + 1)
    return max(0.0, sum(rank.steps[number].seconds - plain for number in asked))


def _median_step(rank: Notes, first: int, last: int) -> float:
    return median(rank.steps[number].seconds for number in range(first, last + 1) if number in rank.steps)


def machine() -> str:
    """Return a description of this machine: processor, cores, software versions, and current load."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.machine())
    versions = f"torch {version('torch').partition('+')[0]}, DeepSpeed {version('deepspeed')}"
    python, load = platform.python_version(), os.getloadavg()[0]
    return f"{name}, {os.cpu_count()} cores, {versions}, Python {python}, load {load:.1f}"


def measure_in(scratch: Path | None, size: str, change: ComparedChange, way: Way, limit_seconds: float) -> Measure:
    """Carry out a change in one way (method), and return its measure; if a launch failed, a measure with the reason.

    scratch: a folder for checkpoints, on the disk to measure; None for the system's temporary folder.
    limit_seconds: the time limit of one launch.
    """
    with tempfile.TemporaryDirectory(prefix="dynatrain-compare-", dir=scratch) as folder:
        parts = ("old", *(("convert",) if way.converts else ()), "new") if way.is_restarted else ("whole",)
        state = Path(folder, "state")
        state.mkdir()
        task = Task(way, parts[0], size, change, str(state))
        try:
            return measure(
                task, [launch(replace(task, part=part), Path(folder, part), limit_seconds) for part in parts]
            )
        except LaunchError as error:
            reason = str(error) or "it failed"
        except KeyError as error:
            reason = f"a rank did not note {error}"
        return Measure(way.name, size, str(change), reason=reason)
