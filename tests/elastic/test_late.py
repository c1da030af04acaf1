"""A node comes, and takes long from `initialize` to its loop: nobody waits for it. Real agents, a real engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.runs import Static, check_history, finish, gated, open_gate, steps_on, worker

PAUSE_SECONDS = 20.0
"""Far more than they need, and far less than the late one: it never comes before it is told to."""


@pytest.mark.full
@pytest.mark.parametrize("event", ["kill", "leave"])
def test_nobody_waits_for_who_is_late(train: Callable[..., Job], static: Static, event: str) -> None:
    job = train(nodes="1:3", stage=0 if event == "kill" else 1)
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    gated(job, "b")
    gated(job, "c")
    gated(job, "late", LATE="gate-loop")
    first = job.settled(1)
    open_gate(job, "b")
    both = job.settled(2, first.generation)
    open_gate(job, "late")
    job.wait(lambda: [row for row in job.rows("ready") if row["pid"] == worker(job, "late")], "its engine")
    steps_on(job)
    status = job.status()
    assert status is not None
    assert [one.phase for one in status.members if one.pid == worker(job, "late")] == ["building"]
    begin = time.monotonic()
    job.kill("b", signal.SIGKILL if event == "kill" else signal.SIGTERM)
    alone = job.settled(1, both.generation)
    assert processes(alone) == processes(first) and time.monotonic() - begin < PAUSE_SECONDS
    job.code("b")
    open_gate(job, "c")  # which is not late, and comes before
    with_c = job.settled(2, alone.generation)
    assert processes(with_c) == [processes(first)[0], worker(job, "c")]
    open_gate(job, "gate-loop")
    assert processes(job.settled(3, with_c.generation))[2] == worker(job, "late")
    finish(job, "a", "c", "late")
    check_history(job, static, kills=1 if event == "kill" else 0)
