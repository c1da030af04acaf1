"""From the notes of ranks to a measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from ds_dynatrain.comparison.job import BATCH, Task, Way
from ds_dynatrain.comparison.launch import Launched
from ds_dynatrain.comparison.notes import Read
from ds_dynatrain.comparison.results import Measure

WARM = 2
"""So many first steps of a layout are not counted as steady."""


@dataclass(frozen=True)
class Run:
    """The launches of one way: one that lives through the change (old is new), or two and what came between."""

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
    """KeyError, naming what is missing, for ranks that did not note what they should have."""
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
        steady=_steady(last, task.before, task.before + task.after),
        pause=max((float(record["pause"]) for record in working), default=None),
        certificate=max((float(record["certificate"]) for record in working), default=None),
        wait=max((float(record["wait"]) for record in working), default=0.0),
        ahead=_ahead(first, task) if switches else None,
        moved=max((int(record["sent"]) for record in switches), default=0),
        written=written(Path(task.folder)),
        peak=max(rank.peak() for launched in _launches(run) for rank in launched.notes.values()),
        is_equal=_digest(run.old.notes, "before") == _digest(run.new.notes, "after"),
        losses=_losses(run),
        reason=failed,
        **lost,
    )


def written(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _launches(run: Run) -> list[Launched]:
    return [each for each in (run.old, run.new, run.converter) if each is not None]


def _phases(run: Run, first: Read, last: Read) -> tuple[dict[str, float], float]:
    """Seconds by phase, and the total."""
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


def _steady(rank: Read, after: int, until: int) -> float:
    """A step of the new layout later on."""
    return _median_step(rank, after + WARM + 1, until)


def _ahead(rank: Read, task: Task) -> float:
    """How much longer the steps took between the asking and the change."""
    plain = _median_step(rank, WARM + 1, task.before - task.lead)
    steps = rank.steps()
    asked = [float(steps[number]["seconds"]) for number in range(task.before - task.lead + 1, task.before + 1)]
    return max(0.0, sum(asked) - plain * len(asked))


def _median_step(rank: Read, first: int, last: int) -> float:
    steps = rank.steps()
    return float(median(steps[number]["seconds"] for number in range(first, last + 1) if number in steps))


def _lost(run: Run, resumed: int) -> dict[str, int]:
    """What the first new step says of steps and samples."""
    first_step = [rank.steps()[resumed + 1] for rank in run.new.notes.values() if resumed + 1 in rank.steps()]
    seen = {number for step in first_step for number in step["samples"]}
    wanted = set(range(run.task.before * BATCH, (run.task.before + 1) * BATCH))
    lost, again = len(wanted - seen), len([number for number in seen if number < min(wanted)])
    return {"steps_lost": run.task.before - resumed, "samples_lost": lost, "samples_repeated": again}


def _digest(notes: Mapping[int, Read], when: str) -> str:
    """The one digest that all ranks have noted; one that says so if they differ."""
    found = {record["value"] for rank in notes.values() for record in rank.every("digest") if record["when"] == when}
    return found.pop() if len(found) == 1 else f"{when}: {len(found)} digests"


def _losses(run: Run) -> dict[int, float]:
    """The mean over ranks, whose shares are equal."""
    found: dict[int, list[float]] = {}
    launches = (run.old,) if run.is_one else (run.old, run.new)
    for rank in (rank for launched in launches for rank in launched.notes.values()):
        for number, step in rank.steps().items():
            found.setdefault(number, []).append(_loss(step))
    return {number: mean(found[number]) for number in sorted(found)}


def _loss(step: Mapping[str, Any]) -> float:
    return float(step["loss"])
