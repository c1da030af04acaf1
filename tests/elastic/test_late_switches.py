"""Late switches in a job whose members come and go: masters and moments follow in the first step of the new world.

A death between the pause and the record is one in the old world, and the step of the new one is void.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.deaths import Deaths
from tests.elastic.runs import (
    SCRIPT,
    Static,
    check_history,
    finish,
    first_leaves,
    gated,
    open_gate,
    second_joins,
    steps_on,
    worker,
)
from tests.elastic.test_switch_faults import go_through

LATE = {"late": True}


def test_members_come_and_go(train: Callable[..., Job], static: Static) -> None:
    """A node joins, the script asks for another stage, and the first node leaves."""
    job = train(nodes="1:4", block=LATE, script=SCRIPT.with_name("doing.py"))
    joined = second_joins(job)
    ask(job, {"zero_stage": 2})
    job.wait(lambda: [row for row in job.rows("switch") if row["layout"]["zero_stage"] == 2], "the other stage")
    first_leaves(job, joined)
    check_history(job, static)
    came, _, went = (row for row in switches(job))
    assert 0 < in_pause(came) < came["late_bytes"], came
    assert 0 == in_pause(went) < went["late_bytes"], f"who stays has all weights: {went}"
    assert not made_twice(job)


def ask(job: Job, sizes: dict[str, int], ahead: int = 3) -> None:
    """Let the script of `doing.py` ask for a layout, in a few steps."""
    step = ahead + max(row["step"] for row in job.rows("step"))
    (job.folder / "asking").write_text(f"{step} {json.dumps(sizes)}")
    (job.folder / "asking").rename(job.folder / "switches")


def in_pause(switch: dict[str, float]) -> float:
    """Bytes that were sent while training stood still."""
    return switch["bytes_sent"] - switch["late_bytes"]


def switches(job: Job) -> list[dict[str, float]]:
    """One row of each, as whoever had most to do with it wrote it."""
    rows = {row["step"]: row for row in sorted(job.rows("switch"), key=lambda row: row["late_bytes"])}
    return [rows[step] for step in sorted(rows)]


CALLS = ("forward", "backward", "step")
IN_MICRO_BATCHES = {"train_micro_batch_size_per_gpu": 2}
BUDDIES = {"buddies": {"mode": "copy"}}


def in_window(role: str, *calls: str, act: str = "kill") -> list[str]:
    """Faults of a member with a role, one for each switch; see `faulted`."""
    return [f"{role} window {call} {act}" for call in calls]


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "calls"),
    [(1, CALLS), (2, ("backward",)), (3, ("forward", "step"))],
)
def test_who_comes_is_killed(train: Callable[..., Job], static: Static, stage: int, calls: tuple[str, ...]) -> None:
    """Before the record: nothing is lost, and no step is made twice."""
    job = train(nodes="1:9", stage=stage, block=LATE, own=IN_MICRO_BATCHES if stage == 2 else None)
    go_through(job, "joiner", in_window("joiner", *calls))
    finish(job)
    check_history(job, static)
    assert not made_twice(job)


def made_twice(job: Job) -> list[int]:
    """Steps that a process has made again."""
    made = [(row["pid"], row["step"]) for row in job.rows("step")]
    return [step for pid, step in made if made.count((pid, step)) > 1]


@pytest.mark.full
@pytest.mark.parametrize("role", ["other", "first"])
def test_who_trains_is_killed_without_zero(train: Callable[..., Job], static: Static, role: str) -> None:
    """The others have all of the old world's state."""
    job = train(nodes="1:9", stage=0, block=LATE)
    go_through(job, role, in_window(role, *CALLS))
    finish(job)
    check_history(job, static)
    assert not made_twice(job)


@pytest.mark.full
@pytest.mark.parametrize(("role", "calls"), [("other", ("forward", "step")), ("first", ("backward",))])
def test_who_trains_is_killed_with_buddies(
    train: Callable[..., Job], static: Static, role: str, calls: tuple[str, ...]
) -> None:
    """Its part comes from a copy of the old world, taken before the boundary of the switch. Who is rank 0 after its
    death is open."""
    job = train(nodes="1:9", stage=2, block={**LATE, **BUDDIES})
    go_through(job, role, in_window(role, *calls))
    finish(job)
    check_history(job, static)
    assert len(set(made_twice(job))) <= 4


@pytest.mark.full
@pytest.mark.parametrize("role", ["joiner", "other"])
def test_one_is_killed_right_after_the_record(train: Callable[..., Job], static: Static, role: str) -> None:
    """It is one of the new world, and all go on from the copies of the old one, or of this."""
    job = train(nodes="1:9", stage=1, block={**LATE, **BUDDIES})
    go_through(job, role, [f"{role} commit kill"])
    finish(job)
    check_history(job, static, kills=1)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_who_leaves_is_killed(train: Callable[..., Job], static: Static, stage: int) -> None:
    """It serves until the record: all go back to the world with it, and on without it."""
    job = train(nodes="1:4", stage=stage, block={**LATE, **(BUDDIES if stage else {})})
    job.coordinator("coordinator")
    for name in "abc":
        gated(job, name, "gate-all", **({"FAULT": in_window("leaver", "settle")[0]} if name == "b" else {}))
    for name in "abc":
        worker(job, name)
    open_gate(job, "gate-all")
    first = job.settled(3)
    steps_on(job, 4)
    job.kill("b", signal.SIGTERM)
    job.code("b")
    left = job.settled(2, first.generation)
    assert left.changes[-1].change == "failure", "it was killed before it had handed over"
    steps_on(job)
    finish(job, "a", "c", "coordinator")
    check_history(job, static, kills=1)
    assert len(set(made_twice(job))) <= (2 if stage else 0)


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_one_is_killed_in_a_switch_that_was_asked_for(tmp_path: Path, static: Static, call: str) -> None:
    """A spare takes its place, and all go on from copies of the old world."""
    faults = {"b": in_window("any", call)[0]}
    deaths = Deaths(tmp_path, 1, faults, block=LATE, script=SCRIPT.with_name("doing.py"))
    try:
        deaths.tell("switches", more='{"zero_stage": 2}')
        settled = deaths.job.settled(3, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        assert "restored step" in deaths.log("a")
        steps_on(deaths.job)
        finish(deaths.job)
        check_history(deaths.job, static, kills=1)
        assert len(set(made_twice(deaths.job))) <= 2
    finally:
        deaths.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("role", ["joiner", "other"])
def test_sigterm(train: Callable[..., Job], static: Static, role: str) -> None:
    """It waits for the record: the switch is committed, and then the node goes."""
    job = train(nodes="1:9", block=LATE)
    go_through(job, role, in_window(role, "forward", act="term"))
    status = job.status()
    assert status is not None and all(change.change == "planned" for change in status.changes), status.changes
    finish(job)
    check_history(job, static)
    assert not made_twice(job)


@pytest.mark.full
def test_a_switch_that_fails_is_tried_again_as_an_ordinary_one(train: Callable[..., Job], static: Static) -> None:
    """The newcomer, which trained in the void step, waits in its `engine.step()` for the next attempt."""
    job = train(nodes="1:9", block=LATE)
    job.coordinator("coordinator")
    for name in "abc":
        gated(job, name, **({"FAULT": in_window("joiner", "_arrive", act="fail")[0]} if name == "c" else {}))
    generation = 0
    for count, name in enumerate("abc", 1):
        open_gate(job, name)
        generation = job.settled(count, generation).generation
    steps_on(job)
    finish(job)
    check_history(job, static)
    assert "told to fail" in job.logs() and "this global batch is void" in job.logs()
    assert [row["late_bytes"] for row in switches(job)][-1] == 0 and not made_twice(job)
