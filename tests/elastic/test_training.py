"""An engine in a job whose members come and go: real torchrun agents, a real DeepSpeed loop, a static run beside it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ds_dynatrain.elastic.connection import Connection
from ds_dynatrain.membership.control import pack
from tests.elastic.agents import Job, processes
from tests.elastic.runs import Static, check_history, finish, first_leaves, node_of, second_joins, steps_on, variables


@pytest.mark.full
def test_nodes_join_and_the_first_one_leaves(train: Callable[..., Job], static: Static) -> None:
    """All processes are new ones, as torchrun starts them."""
    job = train(nodes="1:4", variables={"DYNATRAIN_TOKEN": "a token of some length"}, kind=Job)
    first_leaves(job, second_joins(job))
    check_history(job, static)


@pytest.mark.full
def test_whoever_reaches_the_store_decides_nothing(train: Callable[..., Job], static: Static) -> None:
    """A job with a token: a stranger writes a record of the next generation, and the job goes on as it is."""
    token = "a token of some length"
    job = train(nodes="1:4", variables={"DYNATRAIN_TOKEN": token})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    connection = Connection.open(job.address, token)
    port = connection.welcome.store_port
    connection.close()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    board = f"world/{first.term}/{first.generation + 1}/board"
    store.set(f"{board}/job", pack({"registry": {"names": ["a stranger"]}}))  # type: ignore[arg-type]
    job.node("b", is_host=0)
    job.wait(lambda: "'board/job' in the coordinator's store was not written" in job.logs(), "a word about it")
    steps_on(job)
    finish(job, "a")
    check_history(job, static)


@pytest.mark.full
def test_two_nodes_join_and_one_leaves(train: Callable[..., Job], static: Static) -> None:
    """Two workers a node; two changes at once are one or two switches, and a node that goes takes both workers away."""
    job = train(nodes="1:4", workers=2, variables={"WORKERS": "2"})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(2)
    job.node("b", is_host=0)
    job.node("c", is_host=0)
    joined = job.settled(6, first.generation)
    assert processes(joined)[:2] == processes(first)
    job.kill("b", signal.SIGTERM)
    left = job.settled(4, joined.generation)
    assert set(processes(left)) < set(processes(joined)) and processes(left)[:2] == processes(first)
    assert all(change.change == "planned" for change in left.changes), left.changes
    job.code("b")
    finish(job, "a", "c", "coordinator")
    check_history(job, static)


@pytest.mark.full
def test_one_that_differs_is_refused_and_one_dies_while_it_warms_up(train: Callable[..., Job], static: Static) -> None:
    """The job goes on in both cases, and takes the next node that is as it should be."""
    job = train(nodes="1:4")
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    with variables(job, WIDTH="16"):
        job.node("other", is_host=0)
    with variables(job, HOW="dies while warming up"):
        job.node("dying", is_host=0)
    assert job.code("other") != 0 and job.code("dying") != 0
    log = (job.folder / "other.log").read_text()
    assert "cannot join the job: parameter 0 is ['places', [6, 15]" in log, log[-3000:]
    job.node("b", is_host=0)
    joined = job.settled(2, first.generation)
    assert processes(joined)[0] == processes(first)[0]
    finish(job, "a", "b", "coordinator")
    check_history(job, static)


@pytest.mark.full
def test_below_min_and_above_max(train: Callable[..., Job], static: Static) -> None:
    """Above MAX a node waits warm, and steps in for one that goes; below MIN training waits with its state."""
    job = train(nodes="2:2")
    job.coordinator("coordinator")
    for node in ("a", "b", "spare"):
        job.node(node, is_host=0)
    first = job.settled(2)
    job.wait(lambda: (status := job.status()) and len(status.members) == 3, "the spare")
    job.kill(node_of(job, first, 0), signal.SIGTERM)
    replaced = job.settled(2, first.generation)
    assert processes(replaced)[0] == processes(first)[1]
    steps = len(job.rows("step"))
    gone = node_of(job, replaced, 0)
    job.kill(gone, signal.SIGTERM)
    paused = job.wait(lambda: (status := job.status()) and status.paused and status, "the pause")
    job.wait(lambda: [one for one in job.status().members if one.entered == paused.generation], "a world of one")
    made = len(job.rows("step"))
    job.node("c", is_host=0)
    back = job.settled(2, paused.generation)
    assert processes(back)[0] == processes(replaced)[1] and made >= steps
    assert not [row for row in job.rows("step") if row["generation"] == paused.generation], "steps while paused"
    finish(job, *[name for name in ("a", "b", "spare", "c") if job.processes[name].poll() is None], "coordinator")
    check_history(job, static)


@pytest.mark.full
def test_nodes_are_killed_without_zero(train: Callable[..., Job], static: Static) -> None:
    """3 -> 2 -> 1, the last time by the death of rank 0: those that live have all of it, and go on as they are."""
    job = train(nodes="1:4", stage=0, variables={"WORKERS": "2"})
    job.coordinator("coordinator")
    for node in ("a", "b", "c"):
        job.node(node, is_host=0)
    joined = job.settled(3)
    second = node_of(job, joined, 1)
    job.kill(second)
    left = job.settled(2, joined.generation)
    assert processes(left) == [processes(joined)[0], processes(joined)[2]]
    assert left.changes[-1].change == "failure"
    job.kill(node_of(job, left, 0))
    last = job.settled(1, left.generation)
    assert processes(last) == processes(left)[1:]
    finish(job, *[name for name in ("a", "b", "c") if job.processes[name].poll() is None], "coordinator")
    check_history(job, static, kills=2)


@pytest.mark.full  # `test_together` has it with two engines
def test_a_node_is_killed_with_zero(train: Callable[..., Job], static: Static, tmp_path: Path) -> None:
    """Parts of the state die with it: all go back to the newest checkpoint, in the same processes, and on from it."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    job = train(nodes="1:4", stage=1, block={"fallback": fallback}, variables={"WORKERS": "2"})
    job.coordinator("coordinator")
    for node in ("a", "b", "c"):
        job.node(node, is_host=0)
    joined = job.settled(3)
    job.wait(lambda: len(job.rows("step")) > 15, "a checkpoint")
    job.kill(node_of(job, joined, 1))
    left = job.settled(2, joined.generation)
    assert processes(left) == [processes(joined)[0], processes(joined)[2]]
    finish(job, *[name for name in ("a", "b", "c") if job.processes[name].poll() is None], "coordinator")
    made = [row["step"] for row in job.rows("step") if row["pid"] == processes(left)[0]]
    assert len(made) > len(set(made)), "steps since the checkpoint were made again"
    check_history(job, static)


@pytest.mark.full
def test_a_pipeline_grows_and_shrinks(train: Callable[..., Job], tmp_path: Path) -> None:
    """Two stages: a node with two workers joins and makes a second column, another one goes and takes a column away."""
    steps = {"STEPS": "60", "KIND": "pipeline"}
    layouts = [{"data": 1, "pipe": 2}, {"data": 2, "pipe": 1}]
    static = Static(tmp_path / "static", layouts, **steps)
    job = train(nodes="1:3", workers=2, block={"layout": {"data": 1, "pipe": 2, "zero_stage": 1}}, variables=steps)
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(2)
    job.node("b", is_host=0)
    joined = job.settled(4, first.generation)
    assert processes(joined)[:2] == processes(first)
    job.kill("a", signal.SIGTERM)
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(joined)[2:]
    assert job.code("b") == 0, job.logs()
    check_history(job, static)
