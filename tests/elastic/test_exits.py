"""A worker whose script ends with an exit code other than 0 has failed: the others take it back, and other nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.elastic.agents import Job
from tests.elastic.runs import finish, gated, open_gate, steps_on, worker

FULL = pytest.mark.full


@pytest.mark.parametrize("act", ["leave", pytest.param("complain", marks=FULL), pytest.param("vanish", marks=FULL)])
def test_a_script_that_fails_is_started_again(train: Callable[..., Job], act: str) -> None:
    """It joins again, so does a node that comes later, and SIGTERM hands over what a node has at once."""
    job = train(nodes="1:4", block={"buddies": {"mode": "copy"}}, variables={"STEP_SECONDS": "0.1"})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    generation = job.settled(1).generation
    gated(job, "b", "", "--max-restarts=1", FAULT=f"after the step exits {act}")
    open_gate(job, "b")
    joined = job.settled(2, generation)
    old = worker(job, "b")
    steps_on(job, 4)  # copies are whole
    (job.folder / "exits").write_text("0")
    job.wait(lambda: old not in job.workers_of("b"), "the end of the worker")
    if act == "vanish":  # to torchrun all is well
        assert job.code("b") == 0
        job.node("b", is_host=0)
    (job.folder / "exits").unlink()
    generation = job.settled(2, joined.generation).generation
    job.node("c", is_host=0)
    generation = job.settled(3, generation).generation
    begin = time.monotonic()
    job.kill("b", signal.SIGTERM)
    job.settled(2, generation)
    assert time.monotonic() - begin < 15, "torchrun kills after 30 s"
    job.code("b")
    finish(job, "a", "c", "coordinator")


@pytest.mark.full
def test_others_may_leave_after_one_has_ended(train: Callable[..., Job]) -> None:
    """A script that ends before the others', with code 0, keeps none of them from handing over what it has."""
    job = train(nodes="1:3", block={"buddies": {"mode": "copy"}}, variables={"STEP_SECONDS": "0.1"})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    generation = job.settled(1).generation
    job.node("b", is_host=0)
    generation = job.settled(2, generation).generation
    gated(job, "c", FAULT="after the step exits finish")
    open_gate(job, "c")
    joined = job.settled(3, generation)
    steps_on(job, 4)
    (job.folder / "exits").write_text("0")
    assert job.code("c") == 0
    left = job.settled(2, joined.generation)
    begin = time.monotonic()
    job.kill("b", signal.SIGTERM)
    job.settled(1, left.generation)
    assert time.monotonic() - begin < 15, "torchrun kills after 30 s"
    job.code("b")
    finish(job, "a", "coordinator")


@pytest.mark.full
def test_the_only_script_fails_and_starts_again(train: Callable[..., Job]) -> None:
    """Its job has not finished: it begins anew, as under stock torchrun."""
    job = train(nodes="1:1", variables={"STEP_SECONDS": "0.1", "FAULT": "after the step exits leave"})
    (job.folder / "exits").write_text("3")
    job.node("a", "--max-restarts=1")
    old = job.wait(lambda: [row["pid"] for row in job.rows("step") if row["step"] == 1], "two steps")[0]
    job.wait(lambda: old not in job.workers_of("a"), "the end of the worker")
    (job.folder / "exits").unlink()
    job.wait(lambda: [row for row in job.rows("step") if row["pid"] != old], "a step of the next process")
    finish(job, "a")
