"""A node comes whose own limits do not allow it to take part: it is told so, and goes. Real agents, a real engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.runs import Static, check_history, finish, steps_on, variables

pytestmark = pytest.mark.full


def test_it_ends_and_another_one_comes(train: Callable[..., Job], static: Static) -> None:
    job = train(nodes="2:3")
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    first = job.settled(2)
    with variables(job, FAULT="joiner prepare unable"):
        job.node("unable", is_host=0)
    assert job.code("unable") != 0
    log = (job.folder / "unable.log").read_text()
    assert "this process cannot take part in the job" in log and "no descriptors left" in log, log[-3000:]
    job.settled(2, first.generation)
    steps_on(job)
    job.node("c", is_host=0)
    joined = job.settled(3, first.generation)
    assert processes(joined)[:2] == processes(first)
    finish(job, "a", "b", "c")
    check_history(job, static)
