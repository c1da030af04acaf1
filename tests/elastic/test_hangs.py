"""Collectives that do not end though all members live: one of them stands still for a while."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.elastic.membership_machine import HANG_STEPS
from tests.elastic.agents import Job, processes
from tests.elastic.driver import running
from tests.elastic.runs import Static, check_history, finish, steps_on, variables

COLLECTIVE_SECONDS = 3.0
"""Less than a member that stands still takes (`faulted.PAUSE_SECONDS`), and more than any step."""


class TestMembership:
    def test_the_same_members_form_a_world_anew(self) -> None:
        driver = running("a", "b")
        for member in ("a/0", "b/0"):  # both say it before a generation comes
            driver.say(member, step=7, broken=1, hung="allreduce, 600 s")
        driver.wait(1)
        world = driver.world
        assert (world.change, world.members, world.lost, world.hangs) == ("failure", ("a/0", "b/0"), (), 1)
        assert world.reason == "a collective has not ended on a/0: allreduce, 600 s"

    def test_again_within_a_few_steps_is_counted(self) -> None:
        for steps, hangs in ((HANG_STEPS, 2), (HANG_STEPS + 1, 1)):
            driver = running("a", "b")
            for step in (7, 7 + steps):
                driver.say("a/0", step=step, broken=driver.world.generation, hung="allreduce, 600 s")
                driver.wait(1)
                driver.enter()
            assert driver.world.hangs == hangs

    def test_other_failures_are_not_counted(self) -> None:
        driver = running("a", "b")
        driver.say("a/0", step=7, broken=1, hung="allreduce, 600 s")
        driver.wait(1)
        driver.enter()
        driver.say("b/0", broken=2)
        driver.wait(1)
        assert driver.world.hangs == 0 and driver.world.reason == "a collective failed on b/0"


def two(train: Callable[..., Job], **given: Any) -> tuple[Job, int]:
    """A job of two nodes, which stand still at the reductions of the steps in `$OUT/a` and `$OUT/b`, and its
    generation."""
    block = {"elastic": {"collective_seconds": COLLECTIVE_SECONDS}, **given.pop("block", {})}
    job = train(nodes="2:2", block=block, variables={"STEP_SECONDS": "0.1"}, **given)
    job.coordinator("coordinator")
    for node in "ab":
        with variables(job, FAULT=f"reduction {node} pause"):
            job.node(node, is_host=0)
    first = job.settled(2)
    steps_on(job)
    return job, first.generation


def stand_still(job: Job, node: str) -> None:
    """Let a node do so a step or two from now."""
    last = max(row["step"] for row in job.rows("step"))
    (job.folder / "telling").write_text(str(last + 2))
    (job.folder / "telling").rename(job.folder / node)


def test_the_batch_is_dealt_again(train: Callable[..., Job], static: Static) -> None:
    job, generation = two(train)
    before = job.status()
    stand_still(job, "b")
    again = job.settled(2, generation)
    assert before is not None and processes(again) == processes(before), "nobody is given up"
    steps_on(job)
    finish(job)
    check_history(job, static)
    logs = job.logs()
    assert "a collective has not ended on " in logs
    assert "the main thread here is in all" in logs, "who waits says in which collective"
    assert "the main thread here is in no collective; at " in logs and ", in pause" in logs


@pytest.mark.full
def test_the_second_one_within_ten_steps_ends_the_job(train: Callable[..., Job], tmp_path: Path) -> None:
    job, generation = two(train)
    stand_still(job, "b")
    job.settled(2, generation)
    stand_still(job, "a")
    assert {job.code(node) for node in "ab"} == {1}, job.logs()
    for node in "ab":
        said = (tmp_path / f"{node}.log").read_text()
        assert "again within a few steps of the last time" in said and "collective_seconds" in said
