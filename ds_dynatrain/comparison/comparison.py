"""The measurement itself: every way of every change at every size, one after the other, in ranks under torchrun.

The ranks end with this process, whatever ends it. A measure is made from their notes.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from ds_dynatrain.comparison.job import BATCH, Change, Task, Way
from ds_dynatrain.comparison.notes import Read
from ds_dynatrain.comparison.results import Comparison, Measure
from ds_dynatrain.errors import DynatrainError

ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
}
"""Environment of the ranks, unless the user sets these: several ranks share the cores, and only CPU members can switch.
"""
END_SECONDS = 10.0


class LaunchError(DynatrainError):
    """A launch that ended with an error, or not in time. The message is the first rank's own, if it had one."""


@dataclass(frozen=True)
class Launched:
    """A finished launch: when it was started (the machine's clock), and the notes of its ranks, by member."""

    at: float
    notes: Mapping[int, Read]


def launch(task: Task, processes: int, notes: Path, limit_seconds: float) -> Launched:
    """Run a task in `processes` ranks, which write notes into a new folder; LaunchError with the reason if it fails."""
    notes.mkdir(parents=True)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "ds_dynatrain.comparison.worker", str(notes), task.to_json()]
    return _launched(command, notes, limit_seconds, f"{task.program}, {task.part}, {processes} ranks")


def convert(folder: Path, notes: Path, limit_seconds: float) -> tuple[float, Launched]:
    """Convert DeepSpeed's checkpoint to its universal form; return (seconds, notes)."""
    notes.mkdir(parents=True)
    done = _launched(
        ["-m", "ds_dynatrain.comparison.converter", str(folder), str(notes)], notes, limit_seconds, "the converter"
    )
    return time.monotonic() - done.at, done


def _launched(arguments: Sequence[str], notes: Path, limit_seconds: float, what: str) -> Launched:
    begin, output = time.monotonic(), notes / "output"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
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
    read = Read.all_of(notes)
    if status:
        raise LaunchError(
            _reason(read, output)
            or f"{what}: exit status {status} without a word; look for the kernel's killer in dmesg"
        )
    return Launched(begin, read)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launch and all processes that it started, if any are left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _reason(read: Mapping[int, Read], output: Path) -> str:
    """Return why a launch failed: the error that a rank noted, else the last line of the output."""
    errors = [record["text"] for rank in read.values() for record in rank.every("error")]
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return str(errors[0]) if errors else lines[-1] if lines else ""


WARM = 2
"""Number of first steps in a layout that do not count as steady."""


@dataclass(frozen=True)
class Run:
    """The launches of one way: one that lives through the change (old is new), or two, and perhaps a converter."""

    task: Task
    old: Launched
    new: Launched
    converter: Launched | None = None
    convert_seconds: float = 0.0

    @property
    def is_one(self) -> bool:
        """Whether the processes live through the change."""
        return self.old is self.new


def measure(way: Way, run: Run) -> Measure:
    """Return the measure of a finished run; KeyError, naming the missing note, if a rank did not write it."""
    first, last, task = run.old.notes[0], run.new.notes[0], run.task
    phases, total = _phases(run, first, last)
    phases["rest"] = total - sum(phases.values())
    switches = [record for rank in run.new.notes.values() for record in rank.every("switch")]
    going_on = [rank for rank in run.new.notes.values() if task.before + 1 in rank.steps()]
    working = [rank.every("switch")[-1] for rank in going_on if rank.every("switch")]
    failed = next((record["reason"] for record in switches if record["outcome"] != "committed"), "")
    lost = _lost(run, int(last.value("resumed", "step")))
    return Measure(
        way=way.name,
        size=task.size,
        change=str(task.change),
        parameters=int(first.value("model", "parameters")),
        phases={name: seconds for name, seconds in phases.items() if seconds > 0},
        total=total,
        steady=_median_step(last, task.before + WARM + 1, task.before + task.after),
        pause=max((float(record["pause"]) for record in working), default=None),
        certificate=max((float(record["certificate"]) for record in working), default=None),
        wait=max((float(record["wait"]) for record in working), default=0.0),
        ahead=_ahead(first, task) if switches else None,
        moved=max((int(record["sent"]) for record in switches), default=0),
        written=written(Path(task.folder)),
        peak=max(rank.peak() for each in (run.old, run.new, run.converter) if each for rank in each.notes.values()),
        is_equal=_digest(run.old.notes, "before") == _digest(run.new.notes, "after"),
        losses=_losses(run),
        reason=failed,
        **lost,
    )


def written(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _phases(run: Run, first: Read, last: Read) -> tuple[dict[str, float], float]:
    """Return (seconds by phase, the total)."""
    apart = sum(float(record["seconds"]) for record in last.every("apart"))
    new_step = last.at("end") - last.at("resume") - apart
    if run.is_one:
        phases = {name: seconds for name, seconds in last.phases().items() if name != "import"}
        phases["first step"] -= apart
        for part in last.every("part"):
            phases[part["name"]] = phases.get(part["name"], 0.0) + part["seconds"]
            phases["first step"] -= part["seconds"] if part["is_in_step"] else 0.0
        return phases, last.at("ready") - first.at("begin") + new_step
    phases = {"save": first.phases()["save"], "convert": run.convert_seconds}
    phases |= {"start": last.at("started") - run.new.at, **last.phases()}
    old_part = first.at("saved") - first.at("begin")
    return phases, old_part + run.convert_seconds + last.at("ready") - run.new.at + new_step


def _ahead(rank: Read, task: Task) -> float:
    """Return the seconds by which the steps between the request and the change took longer than plain ones."""
    plain = _median_step(rank, WARM + 1, task.before - task.lead)
    steps = rank.steps()
    asked = [float(steps[number]["seconds"]) for number in range(task.before - task.lead + 1, task.before + 1)]
    return max(0.0, sum(asked) - plain * len(asked))


def _median_step(rank: Read, first: int, last: int) -> float:
    steps = rank.steps()
    return float(median(steps[number]["seconds"] for number in range(first, last + 1) if number in steps))


def _lost(run: Run, resumed: int) -> dict[str, int]:
    """Return the steps and samples that were lost or repeated, counted in the first new step."""
    first_step = [rank.steps()[resumed + 1] for rank in run.new.notes.values() if resumed + 1 in rank.steps()]
    seen = {number for step in first_step for number in step["samples"]}
    wanted = set(range(run.task.before * BATCH, (run.task.before + 1) * BATCH))
    lost, again = len(wanted - seen), len([number for number in seen if number < min(wanted)])
    return {"steps_lost": run.task.before - resumed, "samples_lost": lost, "samples_repeated": again}


def _digest(notes: Mapping[int, Read], when: str) -> str:
    """Return the digest that all ranks have noted; a text that equals no digest if they differ."""
    found = {record["value"] for rank in notes.values() for record in rank.every("digest") if record["when"] == when}
    return found.pop() if len(found) == 1 else f"{when}: {len(found)} digests"


def _losses(run: Run) -> dict[int, float]:
    """Return the loss of each step, the mean over ranks, whose shares are equal."""
    found: dict[int, list[float]] = {}
    launches = (run.old,) if run.is_one else (run.old, run.new)
    for rank in (rank for launched in launches for rank in launched.notes.values()):
        for number, step in rank.steps().items():
            found.setdefault(number, []).append(float(step["loss"]))
    return {number: mean(found[number]) for number in sorted(found)}


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
    """Measure all ways of all changes at all sizes.

    A way that fails becomes a measure with the reason; other errors are raised. limit_seconds: of one launch. scratch:
    where checkpoints are written, on the disk to measure; a temporary folder by default. say: called with a line before
    and after each way. keep: called with all measures so far, after each way.
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
    """Return in words the machine on which the figures are taken, its versions, and how busy it is."""
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
    """Return a measure as one line."""
    if not found.is_done:
        return f"    not possible: {found.reason.splitlines()[0]}"
    pause = "" if found.pause is None else f", pause {1e3 * found.pause:.0f} ms"
    return f"    {found.total:.2f} s to the end of the first step{pause}, {'' if found.is_equal else 'NOT '}bit-equal"
