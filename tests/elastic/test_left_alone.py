"""All who held the state have died, and somebody is there who never had it: real agents, a real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.checkpoint.folder import tags
from tests.elastic.agents import Job
from tests.elastic.runs import finish, gated, open_gate, steps_on, worker

pytestmark = pytest.mark.full


@pytest.mark.parametrize("nodes", ["1:1", "1:2"])
def test_it_goes_on_from_the_fallback_checkpoint(train: Callable[..., Job], tmp_path: Path, nodes: str) -> None:
    """A spare, which has no engine yet; a newcomer, which has one and is not in its loop yet."""
    kept = tmp_path / "kept"
    job = begun(train, nodes, {"fallback": {"path": str(kept), "every_steps": 3}})
    job.wait(lambda: tags(kept), "a checkpoint")
    steps_on(job)
    first, second = worker(job, "a"), worker(job, "b")
    job.kill("a")
    job.wait(lambda: [row for row in job.rows("step") if row["pid"] == second], "a step of the other one")
    finish(job, "b", "coordinator")
    made = {pid: [row["step"] for row in job.rows("step") if row["pid"] == pid] for pid in (first, second)}
    assert 0 < made[second][0] <= made[first][-1] + 1, "it did not begin anew, and lost no more than it had to"


def test_without_a_checkpoint_a_spare_starts_the_script(train: Callable[..., Job]) -> None:
    """As under stock torchrun: what it loads itself is its own matter."""
    job = begun(train, "1:1", {})
    pid = worker(job, "b")
    job.kill("a")
    job.wait(lambda: [row for row in job.rows("step") if row["pid"] == pid], "a step of the other one")
    assert "there is no checkpoint to go on from" in (job.folder / "b.log").read_text()
    finish(job, "b", "coordinator")


def test_without_a_checkpoint_one_that_has_an_engine_says_so(train: Callable[..., Job]) -> None:
    job = begun(train, "1:2", {})
    pid = worker(job, "b")
    job.kill("a")
    assert job.code("b") != 0
    assert "no checkpoint" in (job.folder / "b.log").read_text()
    assert not [row for row in job.rows("step") if row["pid"] == pid]


def begun(train: Callable[..., Job], nodes: str, block: dict[str, dict[str, object]]) -> Job:
    """A job in which a trains, and b waits above MAX, or comes and takes its time on the way to its loop."""
    job = train(nodes=nodes, block=block, variables={"STEP_SECONDS": "0.1"})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.settled(1)
    steps_on(job)
    gated(job, "b", LATE="8")
    open_gate(job, "b")
    if nodes == "1:1":
        job.wait(lambda: (status := job.status()) and "waiting" in [one.phase for one in status.members], "the spare")
    else:
        pid = worker(job, "b")
        job.wait(lambda: [row for row in job.rows("ready") if row["pid"] == pid], "the engine of b")
    return job
