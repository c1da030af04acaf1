"""Stock torchrun agents, real processes, no DeepSpeed: nodes come, go, die and hang; the others stay who they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Job, finish, processes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job, and leaves nothing of it behind."""
    jobs: list[Job] = []

    def make(**settings: Any) -> Job:
        jobs.append(Job(tmp_path, **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.clean_up()


@pytest.mark.full
def test_a_node_joins_and_a_node_is_killed(start: Callable[..., Job]) -> None:
    job = start(nodes="2:4")
    job.node("a")
    job.node("b", is_host=0)  # else whoever comes first hosts the coordinator, and b is killed
    first = job.settled(2)
    job.node("c")
    joined = job.settled(3)
    assert processes(joined)[:2] == processes(first), "the same processes, the same ranks"
    job.kill("b")
    left = job.settled(2, joined.generation)
    victim = next(one.pid for one in joined.members if one.member not in left.ranks)
    assert processes(left) == [pid for pid in processes(joined) if pid != victim]
    assert left.changes[-1].change == "failure"
    job.wait(lambda: not Path(f"/proc/{victim}").exists(), "the end of the killed agent's worker")
    finish(job, "a", "c")
    for pid in processes(left):
        rows = [row["step"] for row in job.rows("step") if row["pid"] == pid]
        assert rows == sorted(set(rows))


@pytest.mark.full
def test_a_token_file_in_the_command_line_is_enough(start: Callable[..., Job]) -> None:
    """Its workers prove it, too; the path means what it means where torchrun was started."""
    job = start(variables={"DYNATRAIN_TOKEN": "a token of another job"})
    (job.folder / "token").write_text("a token that no variable names")
    (job.folder / "token").chmod(0o600)
    job.node("a", token_file="token")
    job.wait(lambda: job.rows("formed") and job.rows("step"), "a step")
    finish(job, "a")


@pytest.mark.full
def test_the_first_node_leaves(start: Callable[..., Job]) -> None:
    """SIGTERM to the node of rank 0: it goes between two steps, and no step is lost or made twice."""
    job = start()
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    job.node("b", is_host=0)
    job.node("c", is_host=0)
    joined = job.settled(3)
    job.kill("a", signal.SIGTERM)
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(joined)[1:] and first.ranks[0] not in left.ranks
    assert all(change.change == "planned" for change in left.changes)
    assert job.code("a") != 0  # stock torchrun's, after SIGTERM
    assert [row["pid"] for row in job.rows("left")] == processes(first)
    finish(job, "b", "c", "coordinator")


@pytest.mark.full
def test_the_coordinator_is_killed_and_started_again(start: Callable[..., Job]) -> None:
    job = start()
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    first = job.settled(2)
    job.kill("coordinator")
    job.code("coordinator")
    made = job.steps(first.generation)
    job.wait(lambda: job.steps(first.generation) > made + 40, "steps without a coordinator")
    job.coordinator("again")
    back = job.wait(lambda: (status := job.status()) and len(status.ranks) == 2 and status, "the same world")
    assert (back.generation, back.ranks) == (first.generation, first.ranks) and back.term != first.term
    job.node("c", is_host=0)
    joined = job.settled(3)
    assert processes(joined)[:2] == processes(first)
    job.kill("c")
    assert processes(job.settled(2, joined.generation)) == processes(first)
    finish(job, "a", "b", "again")


@pytest.mark.full
def test_a_worker_that_hangs_is_replaced(start: Callable[..., Job]) -> None:
    """The others go on; the agent ends it, starts another one, which joins as a newcomer."""
    job = start()
    job.node("a")
    first = job.settled(1)
    job.node("b", "--max-restarts=3")
    joined = job.settled(2, first.generation)
    hung = processes(joined)[1]
    os.kill(hung, signal.SIGSTOP)
    alone = job.wait(lambda: job.rows("broken") or job.rows("formed"), "a sign")
    replaced = job.wait(
        lambda: (status := job.settled(2, joined.generation)) and hung not in processes(status) and status,
        "the replacement",
    )
    assert alone and processes(replaced)[0] == processes(first)[0]
    assert not Path(f"/proc/{hung}").exists()
    finish(job, "a", "b")


@pytest.mark.full
def test_loader_processes_hide_no_death(start: Callable[..., Job]) -> None:
    """They inherit the sockets of the worker that is killed; copies that stay open would hide its death for 5 s."""
    job = start()
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    job.node("b", is_host=0)
    joined = job.settled(2, first.generation)
    victim = processes(joined)[1]
    loaders = [int(pid) for pid in Path(f"/proc/{victim}/task/{victim}/children").read_text().split()]
    assert len(loaders) == 2
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    left = job.settled(1, joined.generation)
    formed = [row["time"] for row in job.rows("formed") if row["generation"] == left.generation]
    assert formed[0] - begin < 2
    job.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in loaders), "the end of the loader processes")
    finish(job, "a", "coordinator")


@pytest.mark.full
def test_two_workers_a_node_under_the_name_of_c10d(start: Callable[..., Job]) -> None:
    """The opt-in for command lines that cannot be changed; both workers of a killed node are one change."""
    job = start(workers=2, backend="c10d", variables={"DYNATRAIN_REPLACE_C10D": "1"})
    job.node("a")
    first = job.settled(2)
    job.node("b")
    joined = job.settled(4)
    job.kill("b")
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(first) and left.generation == joined.generation + 1
    finish(job, "a")
