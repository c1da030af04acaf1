"""All nodes are told to end at once: there is nobody to hand over to, so what they hold is saved, at one step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.checkpoint.folder import latest
from tests.elastic.agents import Job, processes
from tests.elastic.runs import finish, steps_on, training, worker

SHUTDOWN_SECONDS = 30.0
"""After which torchrun kills workers that were told to end."""


@pytest.mark.full
def test_the_only_node_is_told_to_end(train: Callable[..., Job], tmp_path: Path) -> None:
    job = train(block={"fallback": {"path": str(tmp_path / "kept"), "every_steps": 1000}}, **quick())
    job.node("a")
    job.settled(1)
    os.kill(worker(job, "a"), signal.SIGTERM)
    assert job.code("a") == 0, job.logs()
    assert latest(tmp_path / "kept") == f"step{steps_made(job)}"


@pytest.mark.full
@pytest.mark.parametrize("who", ["agents", "workers"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_nodes_are_told_to_end_at_once(train: Callable[..., Job], tmp_path: Path, who: str, stage: int) -> None:
    """A launch of another size goes on at the step at which they have ended."""
    kept = str(tmp_path / "kept")
    block = {"fallback": {"path": kept, "every_steps": 20}, "resume": {"path": kept}}
    job = train(stage=stage, block=block, **quick())
    job.node("a")
    job.node("b", is_host=0)
    job.settled(2)
    steps_on(job)
    workers, begin = [worker(job, name) for name in ("a", "b")], time.monotonic()
    if who == "agents":
        job.kill("a", signal.SIGTERM)
        job.kill("b", signal.SIGTERM)
    else:
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
    codes = {job.code("a"), job.code("b")}
    assert codes == {0} if who == "workers" else 0 not in codes, job.logs()  # stock torchrun's, after SIGTERM
    assert time.monotonic() - begin < SHUTDOWN_SECONDS, "nobody had to be killed"
    made = {pid: max(row["step"] for row in job.rows("step") if row["pid"] == pid) + 1 for pid in workers}
    assert set(made.values()) == {steps_made(job)}, "all have ended at one step"
    tag = latest(Path(kept))  # with a number behind it, if one was due at this very step
    assert tag is not None and tag.partition("-")[0] == f"step{steps_made(job)}"
    (tmp_path / "again").mkdir()
    again = training(tmp_path / "again", stage=stage, block=block, workers=3, **quick())
    try:
        again.node("a")
        assert len(processes(again.settled(3))) == 3
        finish(again)
        assert min(row["step"] for row in again.rows("step")) == steps_made(job)
    finally:
        again.clean_up()


@pytest.mark.full
def test_without_a_fallback_they_end_and_say_that_nothing_was_saved(train: Callable[..., Job]) -> None:
    job = train(**quick())
    job.node("a")
    job.node("b", is_host=0)
    job.settled(2)
    for name in ("a", "b"):
        os.kill(worker(job, name), signal.SIGTERM)
    assert (job.code("a"), job.code("b")) == (0, 0), job.logs()
    said = "".join((job.folder / f"{name}.log").read_text() for name in ("a", "b"))
    assert said.count(f"nothing of step {steps_made(job)} was saved") == 1, said[-3000:]
    assert "configure dynatrain.fallback.path" in said


@pytest.mark.full
def test_who_waits_below_min_is_told_to_end(train: Callable[..., Job], tmp_path: Path) -> None:
    """One after the other: the first hands over to the second, which then waits for others, and saves."""
    job = train(nodes="2:4", block={"fallback": {"path": str(tmp_path / "kept"), "every_steps": 1000}}, **quick())
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    job.settled(2)
    os.kill(worker(job, "a"), signal.SIGTERM)
    assert job.code("a") == 0
    paused = job.wait(lambda: (status := job.status()) and status.paused and status, "the pause")
    job.wait(lambda: [one for one in job.status().members if one.entered == paused.generation], "a world of one")
    os.kill(worker(job, "b"), signal.SIGTERM)
    assert job.code("b") == 0, job.logs()
    assert latest(tmp_path / "kept") == f"step{steps_made(job)}"


@pytest.mark.full
def test_a_spare_goes_on_from_what_the_only_node_has_saved(train: Callable[..., Job], tmp_path: Path) -> None:
    """It has no state yet, so it begins anew: not before the other one has saved, and ended."""
    kept = str(tmp_path / "kept")
    block = {"fallback": {"path": kept, "every_steps": 10**6}, "resume": {"path": kept}}
    job = train(nodes="1:1", block=block, **quick())
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.settled(1)
    job.node("spare", is_host=0)
    job.wait(lambda: (status := job.status()) and "waiting" in [one.phase for one in status.members], "the spare")
    first, second = worker(job, "a"), worker(job, "spare")
    os.kill(first, signal.SIGTERM)
    assert job.code("a") == 0, job.logs()
    job.wait(lambda: [row for row in job.rows("step") if row["pid"] == second], "a step of the spare")
    finish(job)
    made = {pid: [row["step"] for row in job.rows("step") if row["pid"] == pid] for pid in (first, second)}
    assert [*made[first], *made[second]] == list(range(steps_made(job))), "no step is lost or made twice"


def quick() -> dict[str, dict[str, str]]:
    """Many steps a second."""
    return {"variables": {"STEP_SECONDS": "0.05"}}


def steps_made(job: Job) -> int:
    """So many steps were made by all."""
    return max(row["step"] for row in job.rows("step")) + 1
