"""A collective fails though all are alive, and something else happens at that moment: real agents, a real engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import Connection
from ds_dynatrain.elastic.environment import job_token
from ds_dynatrain.elastic.messages import Announce, Report, Status
from tests.elastic.agents import TIMES, Job
from tests.elastic.runs import finish, steps_on
from tests.elastic.wire import Wire

pytestmark = pytest.mark.full

BROKEN = rb'"broken":[1-9]'
SCRIPT = Path(__file__).with_name("breaking.py")
PATIENT = {**TIMES, "silent_seconds": 60.0}


def test_a_node_joins_while_the_word_is_on_its_way(train: Callable[..., Job]) -> None:
    """The coordinator hears of a failed collective when it has just published another generation."""
    job = train(script=SCRIPT, times=PATIENT, variables={"STEP_SECONDS": "0.1"})
    job.coordinator("coordinator")
    job.wait(job.status, "the coordinator")
    with Wire(job.address) as wire:
        node_over(wire, job, "a")
        node_over(wire, job, "b")
        first = job.settled(2)
        wire.hold()
        break_a_collective(job)
        job.wait(lambda: wire.count(BROKEN) == 2, "the word of both")
        newcomer = join(job.address)
        planned = job.wait(lambda: later(job, first), "a generation with the newcomer")
        assert planned.changes[-1].change == "planned"
        wire.release()
        aborted = job.wait(lambda: later(job, planned), "a generation that says what has failed")
        assert aborted.changes[-1].change == "failure" and "a collective failed" in aborted.changes[-1].reason
        newcomer.close()
        steps_on(job)
        finish(job)


def test_a_newcomer_dies_at_the_same_moment(train: Callable[..., Job]) -> None:
    """Both are one generation; that the newcomer's death harms nobody does not make the other thing harmless."""
    times = {**PATIENT, "debounce_seconds": 3.0}
    job = train(script=SCRIPT, times=times, variables={"STEP_SECONDS": "0.1"})
    job.node("a", is_host=1)
    job.wait(job.status, "the coordinator")
    with Wire(job.address) as wire:
        node_over(wire, job, "b")
        first = job.settled(2)
        newcomer = join(job.address)
        planned = job.wait(lambda: later(job, first), "a generation with the newcomer")
        wire.hold()
        wire.release()
        break_a_collective(job)
        job.wait(lambda: wire.count(BROKEN) == 1, "the word of one of them")
        newcomer.send(Report(ready=True))  # a heartbeat: of one that was silent, an end of its connection says nothing
        newcomer.close()
        aborted = job.wait(lambda: later(job, planned), "a generation after both")
        assert " lost (" in aborted.changes[-1].reason and "a collective failed" in aborted.changes[-1].reason
        steps_on(job)
        finish(job)


def node_over(wire: Wire, job: Job, name: str) -> None:
    """Start a node that reaches the coordinator over a wire."""
    address, job.address = job.address, wire.address
    job.node(name, is_host=0)
    job.address = address


def break_a_collective(job: Job) -> None:
    """One fails on all members, a few steps from now."""
    step = max(row["step"] for row in job.rows("step")) + 10
    (job.folder / "breaking").write_text(str(step))
    (job.folder / "breaking").rename(job.folder / "break")
    job.wait(lambda: len(job.rows("broken")) == 2, "the failure on both")


def join(address: Address) -> Connection:
    """A worker that is ready, and then says nothing more."""
    connection = Connection.open(address, job_token(address)[0], "job")
    connection.send(Announce(node="late", local_rank=0, local_size=1, pid=os.getpid()))
    connection.send(Report(ready=True))
    return connection


def later(job: Job, than: Status) -> Status | None:
    """The status, once there is a later generation."""
    status = job.status()
    return status if status is not None and status.generation > than.generation else None
