"""`engine.on_change` where members come and go: each is told of each world, with the coordinator's words for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.elastic.agents import Job
from tests.elastic.runs import SCRIPT, finish, steps_on, worker

CHANGING = SCRIPT.with_name("changing.py")


@pytest.mark.full
@pytest.mark.parametrize("late", [False, True])
def test_a_join_a_death_and_a_leave(train: Callable[..., Job], late: bool) -> None:
    """1 -> 2 -> 3, one is killed and its state comes from a buddy, and the first one leaves."""
    job = train(
        nodes="1:4",
        block={"buddies": {"mode": "copy"}, "late": late},
        script=CHANGING,
        variables={"STEP_SECONDS": "0.2"},
    )
    job.coordinator("coordinator")
    generation = 0
    for size, node in enumerate("abc", start=1):
        job.node(node, is_host=0)
        generation = job.settled(size, generation).generation
        steps_on(job)
    a, b, c = (worker(job, node) for node in "abc")
    steps_on(job, 4)  # copies are whole
    job.kill("b")
    generation = job.settled(2, generation).generation
    steps_on(job)
    job.kill("a", signal.SIGTERM)
    job.settled(1, generation)
    job.code("a")
    finish(job, "c", "coordinator")
    assert not job.rows("cut"), "connections that are none of ours"
    told = {pid: [row for row in job.rows("told") if row["pid"] == pid] for pid in (a, b, c)}
    assert [row["after"]["size"] for row in told[a]] == [2, 3, 2]
    assert [row["after"]["size"] for row in told[b]] == [2, 3]
    assert [row["after"]["size"] for row in told[c]] == [3, 2, 1]
    worlds: dict[int, list[int]] = {}
    for rows in told.values():
        for row, following in pairwise(rows):
            assert row["after"] == following["before"]
        for row in rows:
            worlds.setdefault(row["after"]["world"], []).append(row["after"]["rank"])
    assert [sorted(worlds[world]) for world in sorted(worlds)] == [[0, 1], [0, 1, 2], [0, 1], [0]]
    joined, again, death = (row["reason"] for row in told[a])
    assert "joined" in joined and "joined" in again and "lost" in death, (joined, again, death)
    assert told[b][0]["before"]["rank"] == told[c][0]["before"]["rank"] == -1, "a newcomer begins idle"
    assert "leaves" in told[c][-1]["reason"], told[c]
