"""An elastic job on one machine's accelerator, in which members join, leave and are killed, and the time that each
takes.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from history import mistakes
from nodes import ROOT, Job, processes, training

Found = dict[str, Any]
BLOCK = {"buddies": {"mode": "copy"}, "timeout_seconds": 60}
SCRIPT = ROOT / "tests" / "gpu" / "elastic_training.py"
STEP_SECONDS = 0.02
"""Seconds that the script waits after each step."""
WAIT_SECONDS, CLEAN_UP_SECONDS = 120.0, 10.0
"""Time limits for each expected event, and for ending a job."""
STEPS, SKIPPED = 60, 10
"""Number of steps measured in one world, and how many of them do not count because they compile."""


def elastic(
    script: Path = SCRIPT,
    accelerator: str = "cuda",
    stage: int = 1,
    transport: str = "auto",
    limit_seconds: float = 280.0,
) -> Found:
    """Run a job of two members in which a third joins, one is killed, and one is told to leave. Return the times.

    The result also has the time of a step without the gate, which elastic jobs add.

    transport: as `dynatrain.transport`.
    limit_seconds: the time limit for everything.

    The entry "exit" is 0 if everything went as it should.
    """
    end = time.monotonic() + limit_seconds
    try:
        with _job(script, accelerator, stage, transport, end) as job:
            found = _walk(job)
        with _job(script, accelerator, stage, transport, end, GATE_IS="off") as job:
            return {**found, "step without the gate, ms": _step_ms(job, _two(job))}
    except TimeoutError as error:
        return {"exit": 1, "error": str(error)[-2500:]}


@contextmanager
def _job(script: Path, accelerator: str, stage: int, transport: str, end: float, **variables: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        given = {"DS_ACCELERATOR": accelerator, **variables}
        job = training(Path(folder), stage, BLOCK | {"transport": transport}, "1:4", STEP_SECONDS, **given)
        job.script, job.seconds = script, min(WAIT_SECONDS, max(end - time.monotonic() - CLEAN_UP_SECONDS, 1.0))
        try:
            yield job
        finally:
            job.clean_up()


def _two(job: Job) -> int:
    """Start two members, and return the generation in which they train."""
    job.coordinator("coordinator")
    for node in ("a", "b"):
        job.node(node)
    return job.settled(2).generation


def _walk(job: Job) -> Found:
    first = _two(job)
    found: Found = {"step, ms": _step_ms(job, first), "gate, ms": _gate_ms(job)}
    job.node("c")
    joined = job.settled(3, first)
    found["join, pause in ms"] = round(max(row["pause_ms"] for row in job.rows("switch")))
    whole = [row["step"] for row in job.rows("step")][-1] + 5
    job.wait(lambda: job.rows("step")[-1]["step"] > whole, "copies of that world")
    killed, begin = _node_of(job, processes(joined)[1]), time.monotonic()
    job.kill(killed)  # its worker ends with it
    left = job.settled(2, joined.generation)
    again = min(row["time"] for row in job.rows("step") if row["generation"] == left.generation)
    found["kill to the next step, s"] = round(again - begin, 2)
    stays, goes = (_node_of(job, pid) for pid in processes(left))
    job.kill(goes, signal.SIGTERM)
    job.settled(1, left.generation)
    job.end()
    wrong = mistakes(job.rows(), None)
    code = job.code(stays)
    return {**found, "wrong": "; ".join(wrong[:3]) or "nothing", "exit": code or int(bool(wrong))}


def _node_of(job: Job, worker: int) -> str:
    """Return the name of the agent that started a process."""
    return next(name for name in job.processes if worker in job.workers_of(name))


def _step_ms(job: Job, generation: int) -> float:
    """Return the median milliseconds between two steps in a world, without the script's own pause."""

    def times() -> list[float] | None:
        rows = [row for row in job.rows("step") if row["generation"] == generation]
        made = [row["time"] for row in rows if row["pid"] == rows[0]["pid"]]
        return made if len(made) > STEPS else None

    made = job.wait(times, f"{STEPS} steps")[SKIPPED:]
    between = [later - earlier for earlier, later in pairwise(made)]
    return round(1e3 * (median(between) - STEP_SECONDS), 2)


def _gate_ms(job: Job) -> str:
    """Return text with the median times for which the gate waits for the device, and then for the others."""
    lines = [line for file in job.folder.glob("gate-*.lines") for line in file.read_text().splitlines()]
    rows = [json.loads(line) for line in lines][SKIPPED:]
    device, rounds = (median(row[name] for row in rows) for name in ("device_ms", "rounds_ms"))
    return f"{device:.2f} for the device, {rounds:.2f} for the others"
