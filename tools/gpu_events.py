"""An elastic job on one machine's accelerator to which many events happen, compared with an undisturbed run.

Members are killed at many points of a step, one stands still for a while, and one leaves. The losses of both runs must
be the same.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_elastic import BLOCK, CLEAN_UP_SECONDS, SCRIPT, WAIT_SECONDS, Found
from history import history, mistakes
from nodes import Job, Row, training

INSTANTS = ("forward", "backward", "reduction", "update")
"""Points at which a member is killed, as named in `tests/elastic/faulted.py`. The last one is inside the step."""
KILLS = 10
HANG_SECONDS, PAUSE_SECONDS = 10.0, 20.0
"""Time limit of a collective, and the seconds for which one member stands still, which is longer."""
STEP_SECONDS, AHEAD = 0.3, 4
"""Seconds that the script waits after each step, and number of steps between two events, in which copies become
complete."""
FURTHEST = 1e-3
"""Largest relative difference of a loss from that of the undisturbed run."""
SEED = 5


def events(
    script: Path = SCRIPT,
    accelerator: str = "cuda",
    size: int = 3,
    instants: tuple[str, ...] = INSTANTS,
    kills: int = KILLS,
    limit_seconds: float = 280.0,
    note: Callable[[Found], object] = lambda found: None,
) -> Found:
    """Let members join one after the other, and let an event happen to the full world each time. Return the times.

    size: the size of the full world.
    kills: the number of kills at random times.
    note: function that is called with the results so far.

    The entry "exit" is 0 if everything went as it should and the losses are those of an undisturbed run.
    """
    end, found = time.monotonic() + limit_seconds, Found()
    try:
        with _job(script, accelerator, f"1:{size}", STEP_SECONDS, end) as job:
            for name, seconds in _happens(job, size, instants, kills):
                found[name] = round(seconds, 2)
                note(found)
            job.end()
            rows = job.rows()
        wrong = mistakes(rows, None)
        found |= {"steps": max(row["step"] for row in rows if row["event"] == "step"), "wrong": "; ".join(wrong[:3])}
        note(found)
        found["furthest loss"] = _furthest(rows, _undisturbed(script, accelerator, found["steps"], end))
    except TimeoutError as error:
        return {**found, "exit": 1, "error": str(error)[-2500:]}
    return {**found, "exit": int(bool(wrong) or found["furthest loss"] > FURTHEST)}


@contextmanager
def _job(script: Path, accelerator: str, nodes: str, step_seconds: float, end: float, **given: str) -> Iterator[Job]:
    block = {**BLOCK, "elastic": {"collective_seconds": HANG_SECONDS}}
    given |= {"DS_ACCELERATOR": accelerator, "PAUSE_SECONDS": str(PAUSE_SECONDS)}
    with tempfile.TemporaryDirectory() as folder:
        job = training(Path(folder), 1, block, nodes, step_seconds, **given)
        job.script, job.seconds = script, min(WAIT_SECONDS, max(end - time.monotonic() - CLEAN_UP_SECONDS, 1.0))
        try:
            yield job
        finally:
            job.clean_up()


def _happens(job: Job, size: int, instants: tuple[str, ...], kills: int) -> Iterator[tuple[str, float]]:
    """Yield (event, seconds from the last step before it to the first step after it)."""
    draw, spares = random.Random(SEED), [f"spare{number}" for number in range(kills)]
    job.coordinator("coordinator")
    for number in range(size - 1):
        job.node(f"first{number}")
    for instant in instants:
        _gated(job, instant, FAULT=f"{instant} {instant} kill")
    _gated(job, "switch", FAULT="joiner move kill")
    _gated(job, "pause", FAULT="reduction pause pause")
    for spare in spares:
        _gated(job, spare)
    job.settled(size - 1)
    for instant in instants:
        yield f"{instant}: joins, s", _joins(job, instant, size)
        yield f"{instant}: is killed, s", _follows(job, size - 1, lambda instant=instant: _tell(job, instant))  # type: ignore[misc]
    if size > 2:  # otherwise only the joining member would take part
        yield "a switch: the joiner is killed, s", _follows(job, size - 1, lambda: _dies_joining(job, "switch"))
    yield "pause: joins, s", _joins(job, "pause", size)
    yield "pause: stands still, s", _follows(job, size, lambda: _tell(job, "pause"))
    yield "pause: leaves, s", _follows(job, size - 1, lambda: job.kill("pause", signal.SIGTERM))
    for spare in spares:
        yield f"{spare}: joins, s", _joins(job, spare, size)
        time.sleep(draw.uniform(0, 2 * STEP_SECONDS))
        killed = draw.choice([name for name in job.processes if _trains(job, name)])
        yield f"{spare}: one is killed, s", _follows(job, size - 1, lambda killed=killed: job.kill(killed))  # type: ignore[misc]
    _steps_on(job)


def _trains(job: Job, name: str) -> bool:
    """Return whether a node's worker is in the current world."""
    status = job.status()
    working = [] if status is None else [one.pid for one in status.members if one.rank is not None]
    return any(pid in working for pid in job.workers_of(name))


def _gated(job: Job, node: str, **given: str) -> None:
    """Start a node that warms up, but joins only after a call of `_open`.

    given: environment variables of its worker.
    """
    before = dict(job.variables)
    job.variables |= {"GATE": f"gate-{node}", **given}
    job.node(node, is_host=0)
    job.variables = before


def _steps_on(job: Job) -> None:
    """Wait until `AHEAD` more steps have been made."""
    last = max(row["step"] for row in job.rows("step"))
    job.wait(lambda: max(row["step"] for row in job.rows("step")) >= last + AHEAD, f"{AHEAD} steps more")


def _open(job: Job, node: str) -> None:
    """Let a node join that `_gated` started."""
    (job.folder / f"gate-{node}").touch()


def _dies_joining(job: Job, node: str) -> None:
    _open(job, node)
    job.wait(lambda: job.processes[node].poll() is not None, f"the death of {node}")


def _joins(job: Job, node: str, size: int) -> float:
    return _follows(job, size, lambda: _open(job, node))


def _tell(job: Job, node: str) -> None:
    """Trigger the event that a node was started with, at one of its next steps."""
    step = max(row["step"] for row in job.rows("step")) + 2
    (job.folder / "telling").write_text(str(step))
    (job.folder / "telling").rename(job.folder / node)


def _follows(job: Job, size: int, act: Callable[[], object]) -> float:
    """Let an event happen, and wait until a world of this size trains. Return the seconds without a step."""
    status = job.status()
    before = 0 if status is None else status.generation
    act()
    after = job.settled(size, before).generation
    _steps_on(job)
    steps = job.rows("step")
    again = min(row["time"] for row in steps if row["generation"] == after)
    return float(again - max(row["time"] for row in steps if row["generation"] < after and row["time"] < again))


def _undisturbed(script: Path, accelerator: str, steps: int, end: float) -> list[Row]:
    """Train this many steps on one node without events, and return its lines."""
    with _job(script, accelerator, "1:1", 0.0, end, STEPS=str(steps)) as job:
        job.node("alone", is_host=1)
        job.wait(lambda: job.processes["alone"].poll() is not None, "the run to which nothing happens")
        return list(job.rows())


def _furthest(rows: list[Row], undisturbed: list[Row]) -> float:
    """Return the largest relative difference between a loss and the same loss of the undisturbed run."""
    steps = ([row for row in each if row["event"] == "step"] for each in (rows, undisturbed))
    losses, expected = (history(each)[0] for each in steps)
    return max(abs(losses[step] - expected[step]) / abs(expected[step]) for step in losses.keys() & expected.keys())
