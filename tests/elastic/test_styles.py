"""Loops as users write them: each goes on when a member comes, and when one dies at the worst place of that loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import ROOT, Job, processes
from tests.elastic.runs import Static, check_history, finish

SCRIPT = ROOT / "tests" / "elastic" / "styles.py"
STEP_SECONDS = "0.6"


@pytest.fixture
def start(tmp_path: Path, train: Callable[..., Job]) -> Callable[..., Job]:
    """Makes a job of a style, with its coordinator."""

    def make(style: str, stage: int = 0, **given: Any) -> Job:
        block = {"fallback": {"path": str(tmp_path / "fallback"), "every_steps": 3}} if stage else {}
        variables = {"STYLE": style, "STEP_SECONDS": STEP_SECONDS}
        job = train(stage=stage, block=block, script=SCRIPT, variables=variables, **given)
        job.coordinator("coordinator")
        return job

    return make


@pytest.fixture
def run(tmp_path: Path, start: Callable[..., Job]) -> Callable[..., Job]:
    """A job of two nodes; a third one joins, and then rank 1 dies in a trap of the style's."""

    def make(style: str, stage: int = 0) -> Job:
        job = start(style, stage, nodes="2:4")
        for node in ("a", "b"):
            job.node(node, is_host=0)
        first = job.settled(2)
        job.node("c", is_host=0)
        joined = job.settled(3, first.generation)
        if stage:
            job.wait(lambda: len(job.rows("step")) > 15, "a checkpoint")
        nodes = {pid: node for node in ("a", "b", "c") for pid in job.workers_of(node)}
        (tmp_path / "trap").touch()
        left = job.settled(2, joined.generation)
        fallen = int((tmp_path / "fallen").read_text())
        assert processes(left) == [pid for pid in processes(joined) if pid != fallen]
        finish(job, *[node for pid, node in nodes.items() if pid != fallen], "coordinator")
        return job

    return make


def check_changed(job: Job, *, least: int) -> None:
    """Survivors were told by WorldChanged, whose cause is what gloo said."""
    changed = job.rows("changed")
    assert len(changed) >= least, changed
    assert all("go on with the loader's next" in row["said"] for row in changed), changed


@pytest.mark.full
def test_collectives_and_groups_of_the_users_own(run: Callable[..., Job], static: Static) -> None:
    """They raise WorldChanged when rank 1 dies in front of one; the groups follow the world."""
    job = run("Collectives")
    check_history(job, static, kills=1)
    check_changed(job, least=1)
    sums = job.rows("sums")
    assert {row["size"] for row in sums} == {2, 3}
    for row in sums:
        size = row["size"]
        assert row["sums"] == [size, size, 1 if row["rank"] == 0 else size - 1], row


@pytest.mark.full
def test_backward_of_the_loss(run: Callable[..., Job], static: Static) -> None:
    """torch's call, on the loss that the engine returned, survives as the engine's call does: nothing is raised."""
    job = run("Backward", 1)
    check_history(job, static, kills=1)
    assert not job.rows("changed")


@pytest.mark.full
def test_backward_of_a_loss_that_was_computed_from_it(run: Callable[..., Job], static: Static) -> None:
    """It raises WorldChanged where the death is noticed in it; the loop goes on with the next batch."""
    job = run("Derived", 1)
    check_history(job, static)
    check_changed(job, least=1)


@pytest.mark.full
def test_collectives_of_the_users_own_with_zero(run: Callable[..., Job], static: Static) -> None:
    """All go back to the checkpoint; so does the data."""
    job = run("Collectives", 1)
    check_history(job, static)
    check_changed(job, least=1)


@pytest.mark.full
def test_a_loop_without_a_loader(run: Callable[..., Job], static: Static) -> None:
    """`engine.boundary()` at its top, and the engine's count of steps for the position in the data."""
    check_history(run("Boundary"), static, kills=1)


def check_first(job: Job, joins: bool, size: int) -> None:
    """What those saw that start the job, or join it, before there was an engine."""
    seen = [row for row in job.rows("first") if row["joins"] == joins]
    assert sorted(row["world"][0] for row in seen) == list(range(size)), seen
    for row in seen:
        assert row["world"][1] == row["seen"] == size and row["variables"][:2] == row["world"], row


@pytest.mark.full
@pytest.mark.parametrize("style", ["FirstLine", "OthersFirstLine"])
def test_a_world_before_there_is_an_engine(start: Callable[..., Job], static: Static, style: str) -> None:
    """By our call that of the job, or of the node where a job runs already; by those of others that of the node."""
    job = start(style, nodes="2:4", workers=2)
    for node in ("a", "b"):
        job.node(node, is_host=0)
    first = job.settled(4)
    job.node("c", is_host=0)
    joined = job.settled(6, first.generation)
    assert processes(joined)[:4] == processes(first)
    finish(job, "a", "b", "c", "coordinator")
    check_history(job, static)
    if style == "FirstLine":
        check_first(job, False, 4)
        check_first(job, True, 2)
    else:
        assert len(seen := job.rows("first")) == 6 and all(row["world"][1] == row["seen"] == 2 for row in seen), seen


@pytest.mark.full
def test_a_step_that_always_fails_ends_the_job(start: Callable[..., Job]) -> None:
    """Its worlds are formed anew, in case it was the network; not for ever."""
    job = start("Cut", nodes="2:4")
    for node in ("a", "b"):
        job.node(node, is_host=0)
    assert job.code("a") != 0 and job.code("b") != 0
    assert "the step after 3 was tried 3 times by the same 2 members" in job.logs()
    assert {row["step"] for row in job.rows("step")} == {0, 1, 2}
