"""Nodes come, go and die at once, late, or while there is no coordinator: real agents, a real engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.checkpoint.folder import latest
from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.elastic.messages import Status
from tests.elastic.agents import Job, processes
from tests.elastic.runs import (
    Static,
    check_history,
    finish,
    gated,
    node_of,
    open_gate,
    steps_on,
    variables,
    worker,
    world_with,
)

pytestmark = pytest.mark.full


def test_two_come_at_once_then_one_comes_while_one_goes(train: Callable[..., Job], static: Static) -> None:
    """1 -> 3 -> 3 -> 3: the last time rank 0 is told to go when another one comes."""
    job = train(nodes="1:4")
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    for name, gate in (("b", "gate-both"), ("c", "gate-both"), ("d", ""), ("e", "")):
        gated(job, name, gate)
    first = job.settled(1)
    open_gate(job, "gate-both")
    joined = job.settled(3, first.generation)
    assert processes(joined)[0] == processes(first)[0]
    assert set(processes(joined)[1:]) == {worker(job, "b"), worker(job, "c")}
    open_gate(job, "d")
    job.kill("b", signal.SIGTERM)
    job.code("b")
    changed = job.wait(lambda: world_with(job, worker(job, "d"), 3), "d instead of b")
    assert set(changed) == {processes(first)[0], worker(job, "c"), worker(job, "d")}
    job.kill("a", signal.SIGTERM)
    open_gate(job, "e")
    job.code("a")
    changed = job.wait(lambda: world_with(job, worker(job, "e"), 3), "e instead of a")
    assert set(changed) == {worker(job, name) for name in "cde"}
    status = job.status()
    assert status is not None and all(change.change == "planned" for change in status.changes), status.changes
    finish(job)
    check_history(job, static)


def test_one_dies_while_another_one_comes(train: Callable[..., Job], static: Static) -> None:
    """First while that one is not known yet, then while it is in the world and not in its loop, and takes its time."""
    job = train(nodes="1:4", stage=0)
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    for name in ("b", "c"):
        gated(job, name)
    gated(job, "late", LATE="5")
    open_gate(job, "b")
    joined = job.settled(2, first.generation)
    open_gate(job, "c")
    job.kill("b")
    changed = job.wait(lambda: world_with(job, worker(job, "c"), 2), "c instead of b")
    assert changed == [processes(joined)[0], worker(job, "c")]
    open_gate(job, "late")
    coming = worker(job, "late")
    job.wait(lambda: [row for row in job.rows("ready") if row["pid"] == coming], "the engine of the late one")
    steps_on(job, 2)
    job.kill("c")
    changed = job.wait(lambda: world_with(job, coming, 2), "the late one instead of c")
    assert changed == [processes(joined)[0], coming]
    finish(job)
    check_history(job, static, kills=2)


def test_the_coordinator_dies_and_comes_back(train: Callable[..., Job], static: Static) -> None:
    """Training goes on; a node joins afterwards. The next time a node dies while there is none."""
    job = train(nodes="1:4", stage=0, variables={"WORKERS": "2"})
    job.coordinator("coordinator")
    for name in ("a", "b", "c"):
        gated(job, name)
    open_gate(job, "a")
    open_gate(job, "b")
    first = job.settled(2)
    job.kill("coordinator")
    job.code("coordinator")
    steps_on(job, 4)
    job.coordinator("again")
    back = job.wait(lambda: (status := job.status()) and len(status.ranks) == 2 and status, "the same world")
    assert (back.generation, back.ranks) == (first.generation, first.ranks) and back.term != first.term
    open_gate(job, "c")
    joined = job.settled(3, first.generation)
    assert processes(joined)[:2] == processes(first)
    job.kill("again")
    job.code("again")
    lost = node_of(job, joined, 0)
    job.kill(lost)
    job.code(lost)
    job.coordinator("third")
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(joined)[1:]
    finish(job)
    check_history(job, static, kills=1)


def test_a_worker_crashes_and_its_agent_starts_the_node_again(
    train: Callable[..., Job], static: Static, tmp_path: Path
) -> None:
    """One of two workers is killed; the others go on in their processes, and the node comes back with two new ones."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 2}
    job = train(nodes="1:3", workers=2, block={"fallback": fallback})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(2)
    job.node("b", "--max-restarts=2", is_host=0)
    joined = job.settled(4, first.generation)
    steps_on(job)
    lost = processes(joined)[2:]
    os.kill(lost[1], signal.SIGKILL)
    back = job.wait(
        lambda: (status := job.settled(4, joined.generation)) and not set(lost) & set(processes(status)) and status,
        "two others",
    )
    assert processes(back)[:2] == processes(first) and set(processes(back)[2:]) == set(job.workers_of("b"))
    finish(job)
    check_history(job, static, kills=1)


def test_another_one_dies_while_all_are_restored(train: Callable[..., Job], static: Static, tmp_path: Path) -> None:
    """What it has begun is given up, and those that live begin again."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 2}
    job = train(nodes="1:3", block={"fallback": fallback})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    job.node("b", is_host=0)
    with variables(job, FAULT="any restore kill"):
        job.node("c", is_host=0)
    joined = job.settled(3, first.generation)
    steps_on(job)
    job.kill("b")
    job.code("c")
    left = job.settled(1, joined.generation)
    assert processes(left) == processes(first)
    finish(job)
    check_history(job, static, kills=2)


def test_one_without_a_place_ends_with_the_others(train: Callable[..., Job], static: Static) -> None:
    """It is in the world and idle, and nobody tells it to go."""
    job = train(nodes="1:2", block={"layouts": {"1": {"data": 1}}})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    job.settled(2)
    finish(job)
    check_history(job, static)


def test_too_few_for_too_long(train: Callable[..., Job], tmp_path: Path) -> None:
    """The state is saved, and the process ends with a code of its own."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 1000}
    job = train(nodes="2:3", block={"fallback": fallback, "elastic": {"wait_for_members_seconds": 2}})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    job.settled(2)
    steps_on(job)
    job.kill("b", signal.SIGTERM)
    assert job.code("a") != 0
    log = (job.folder / "a.log").read_text()
    assert f"fewer nodes than MIN for 2 s: this process ends with code {Ending.TOO_FEW}" in log, log[-3000:]
    assert f"exitcode: {int(Ending.TOO_FEW)}" in " ".join(log.split()), log[-3000:]
    made = max(row["step"] for row in job.rows("step")) + 1
    assert latest(tmp_path / "fallback") == f"step{made}"


def test_one_that_comes_below_min_waits_with_the_others(
    train: Callable[..., Job], static: Static, tmp_path: Path
) -> None:
    """3 -> 1 -> 2 -> 3 with MIN = 3: what is left is saved at once, nobody makes a step, and all go on together."""
    kept = tmp_path / "kept"
    job = train(nodes="3:4", block={"fallback": {"path": str(kept), "every_steps": 1000}})
    job.coordinator("coordinator")
    for name in "abc":
        job.node(name, is_host=0)
    job.settled(3)
    steps_on(job)
    for name in "bc":
        job.kill(name, signal.SIGTERM)
        job.code(name)
    alone = job.wait(lambda: paused(job, 1), "a world of one")
    made = max(row["step"] for row in job.rows("step")) + 1
    job.wait(lambda: (latest(kept) or "").partition("-")[0] == f"step{made}", "a checkpoint of what is left")
    job.node("d", is_host=0)
    both = job.wait(lambda: paused(job, 2), "a world of two")
    job.node("e", is_host=0)
    after = job.settled(3, both.generation)
    assert set(processes(after)) == {worker(job, name) for name in "ade"}
    assert not job.steps(alone.generation) and not job.steps(both.generation)
    finish(job)
    check_history(job, static)


def paused(job: Job, size: int) -> Status | None:
    """A world below MIN that so many members have entered."""
    status = job.status()
    if status is None or not status.paused or len(status.members) != size:
        return None
    return status if all(one.entered == status.generation for one in status.members) else None


def test_a_spare_steps_in_for_one_that_is_killed(train: Callable[..., Job], static: Static) -> None:
    job = train(nodes="2:2", stage=0)
    job.coordinator("coordinator")
    for name in ("a", "b", "spare"):
        job.node(name, is_host=0)
    first = job.settled(2)
    job.wait(lambda: (status := job.status()) and len(status.members) == 3, "the spare")
    steps_on(job, 2)
    job.kill(node_of(job, first, 0))
    after = job.settled(2, first.generation)
    assert processes(after)[0] == processes(first)[1]
    assert processes(after)[1] not in processes(first)
    finish(job)
    check_history(job, static, kills=1)


@pytest.mark.parametrize("how", ["behind", "inside"])
def test_a_death_in_a_step_without_zero(train: Callable[..., Job], tmp_path: Path, how: str) -> None:
    """One dies in its optimizer step; one finishes it, and one breaks off: that one takes the state of the other.

    Without clipping, for which DeepSpeed compares norms inside of the step: nobody could finish it.
    """
    unclipped = {"gradient_clipping": 0.0}
    static = Static(tmp_path / "static", own=unclipped)
    job = train(nodes="1:3", stage=0, own=unclipped)
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    with variables(job, FAULT=f"step crash {how}"):
        job.node("b", is_host=0)
    with variables(job, FAULT="step crash kill"):
        job.node("c", is_host=0)
    joined = job.settled(3)
    step = crash(job)
    job.code("c")
    left = job.settled(2, joined.generation)
    worker_of_a = worker(job, "a")
    assert set(processes(left)) == {worker_of_a, worker(job, "b")}
    finish(job)
    check_history(job, static, kills=1)
    made = [row["step"] for row in job.rows("step") if row["pid"] == worker_of_a]
    assert made == sorted(set(made)) and step in made, "it was made once"


def test_a_death_in_a_step_with_zero(train: Callable[..., Job], static: Static, tmp_path: Path) -> None:
    """Nobody can tell what has become of the step: all go back to a checkpoint."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 2}
    job = train(nodes="1:3", block={"fallback": fallback})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    job.node("b", is_host=0)
    with variables(job, FAULT="step crash kill"):
        job.node("c", is_host=0)
    joined = job.settled(3, first.generation)
    step = crash(job)
    job.code("c")
    left = job.settled(2, joined.generation)
    assert set(processes(left)) == {worker(job, "a"), worker(job, "b")} < set(processes(joined))
    job.wait(
        lambda: [row for row in job.rows("step") if row["step"] == step and row["generation"] >= left.generation],
        "the step that it died in, made by the others",
    )
    finish(job)
    check_history(job, static, kills=1)


def test_one_that_is_configured_otherwise_is_refused_and_a_slow_one_is_waited_for(
    train: Callable[..., Job], static: Static
) -> None:
    """The others make steps meanwhile."""
    job = train(nodes="1:4")
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)  # else whoever is first is right
    other = job.variables["SETTINGS"].replace('"lr": 0.0002', '"lr": 0.0003')
    with variables(job, SETTINGS=other):
        job.node("other", is_host=0)
    gated(job, "slow", LATE="6")
    assert job.code("other") != 0
    log = (job.folder / "other.log").read_text()
    assert "cannot join the job: optimizer.params.lr is 0.0003 here and 0.0002 in the running job" in log, log[-3000:]
    open_gate(job, "slow")
    job.wait(lambda: [row for row in job.rows("ready") if row["pid"] == worker(job, "slow")], "its engine")
    steps_on(job, 4)
    joined = job.settled(2, first.generation)
    assert processes(joined) == [processes(first)[0], worker(job, "slow")]
    finish(job)
    check_history(job, static)


def crash(job: Job) -> int:
    """Let it happen a few steps from now; the number of that step."""
    step = max(row["step"] for row in job.rows("step")) + 4
    (job.folder / "crashing").write_text(str(step))
    (job.folder / "crashing").rename(job.folder / "crash")
    return step
