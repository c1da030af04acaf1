"""Nodes of two workers come, go and die in jobs with tensor and sequence parallelism, experts and pipelines."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.elastic.messages import Status
from tests.elastic.agents import Job, processes
from tests.elastic.kinds import KINDS
from tests.elastic.runs import Static, check_history, finish_together, gated, on_device, open_gate, steps_on

pytestmark = pytest.mark.full


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", list(KINDS))
def test_nodes_join_leave_and_are_killed(train: Callable[..., Job], tmp_path: Path, kind: str, stage: int) -> None:
    """1 -> 2 -> 1 -> 2 -> 1 nodes: the first one, with ranks 0 and 1, is told to go; the last one is killed."""
    here, variables = KINDS[kind], {"KIND": kind, "STEPS": "150"}
    static = Static(tmp_path / "static", [dict(here.layout), dict(here.beside)], dict(here.own), **variables)
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 2}
    block = {"layout": {**here.layout, "zero_stage": stage}, **({"fallback": fallback} if stage else {})}
    variables["STEPS"] = "100000"
    job = train(nodes="1:3", workers=2, stage=stage, block=block, own=dict(here.own), variables=variables)
    job.coordinator("coordinator")
    for name in "abc":
        gated(job, name)
    open_gate(job, "a")
    first = job.settled(2)
    open_gate(job, "b")
    joined = job.settled(4, first.generation)
    assert processes(joined)[:2] == processes(first)
    job.kill("a", signal.SIGTERM)
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(joined)[2:]
    assert all(change.change == "planned" for change in left.changes), left.changes
    open_gate(job, "c")
    again = job.settled(4, left.generation)
    assert processes(again)[:2] == processes(left)
    steps_on(job)
    job.kill("c")
    last = job.settled(2, again.generation)
    assert processes(last) == processes(left) and last.changes[-1].change == "failure"
    finish_together(job)
    check_history(job, static, kills=1)
    if (kind, stage) != ("sequence", 1):  # where a part of the masters decides which rank a member has, not its node
        check_groups(job, kind)


def check_groups(job: Job, kind: str) -> None:
    """The node that stays from the second world on keeps the group of its own two workers in the planned changes; on a
    device each world has communicators of its own.
    """
    axis = {"experts": "expert", "pipeline": "pipe"}.get(kind, kind)
    switches = [row for row in job.rows("switch") if row["groups"]]
    names = {
        pid: [row["groups"][axis] for row in switches if row["pid"] == pid] for pid in {row["pid"] for row in switches}
    }
    stayed = [each for each in names.values() if len(each) > 2]
    different = 3 if on_device.get() else 1
    assert len(stayed) == 2 and all(len({*each[:3]}) == different for each in stayed), names


@pytest.mark.parametrize("shares", [(4, 8), (8, 4)])
def test_pipelines_of_different_lengths_are_killed(
    train: Callable[..., Job], tmp_path: Path, shares: tuple[int, int]
) -> None:
    """Of two the second one dies, without buddies, and another one comes; then the first is told to go."""
    variables, one = {"KIND": "pipeline", "STEPS": "150"}, {"data": 1, "pipe": 2}
    uneven = {"data": 2, "pipe": 2, "shares": shares}
    static = Static(tmp_path / "static", [one, uneven], **variables)
    variables["STEPS"] = "100000"
    block = {"layout": {**one, "zero_stage": 0}, "layouts": {"2": one, "4": uneven}}
    job = train(nodes="1:2", workers=2, stage=0, block=block, variables=variables)
    first, joined = joined_by_another(job)
    steps_on(job)
    assert [row["layout"].get("shares") for row in job.rows("switch")] == [[*shares]] * 4
    job.kill("b")
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(first) and left.changes[-1].change == "failure"
    gated(job, "c")
    open_gate(job, "c")
    again = job.settled(4, left.generation)
    steps_on(job)
    job.kill("a", signal.SIGTERM)
    last = job.settled(2, again.generation)
    assert processes(last) == processes(again)[2:]
    job.code("a")
    finish_together(job)
    check_history(job, static, kills=1)


def joined_by_another(job: Job) -> tuple[Status, Status]:
    """A node of two workers trains, and a second one comes: how the job is before and after."""
    job.coordinator("coordinator")
    for name in "ab":
        gated(job, name)
    open_gate(job, "a")
    first = job.settled(2)
    open_gate(job, "b")
    return first, job.settled(4, first.generation)


def test_a_pipeline_that_reads_an_iterator_of_ones_own(train: Callable[..., Job], tmp_path: Path) -> None:
    """A node joins and dies while it reads: `on_switch` gives another iterator, from which the batch is dealt again."""
    variables = {"KIND": "pipeline", "FEED": "own", "STEPS": "150"}
    static = Static(tmp_path / "static", [{"data": 1, "pipe": 2}, {"data": 2, "pipe": 2}], **variables)
    variables["STEPS"] = "100000"
    block = {"layout": {"data": 1, "pipe": 2, "zero_stage": 0}}
    job = train(nodes="1:2", workers=2, stage=0, block=block, variables=variables)
    first, joined = joined_by_another(job)
    steps_on(job)
    (job.folder / "hold").touch()
    job.wait(lambda: job.rows("held") or None, "a member that reads")
    job.kill("b")
    last = job.settled(2, joined.generation)
    assert processes(last) == processes(first) and last.changes[-1].change == "failure"
    finish_together(job)
    check_history(job, static, kills=1)


def test_the_best_layout_by_a_profile(train: Callable[..., Job], tmp_path: Path) -> None:
    """No member could hold all layers: four have two stages twice, cut where the time is, and two have them once."""
    seconds = (1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0)
    layers = tuple(
        LayerCost(name=str(place), forward_seconds=each, backward_seconds=each, kind_bytes={"weight": 100})
        for place, each in enumerate(seconds)
    )
    Profile(layers=layers, train_batch_size=12, micro_batch_size=6).save(tmp_path / "profile.json")
    variables = {"KIND": "pipeline", "STEPS": "150"}
    static = Static(tmp_path / "static", [{"data": 1, "pipe": 2}, {"data": 2, "pipe": 2}], **variables)
    variables["STEPS"] = "100000"
    balance = {"mode": "off", "profile": str(tmp_path / "profile.json"), "memory_limit_bytes": 800}
    block = {"layout": {"data": 1, "pipe": 2, "zero_stage": 0}, "layouts": "best", "balance": balance}
    job = train(nodes="1:2", workers=2, stage=0, block=block, variables=variables)
    first, joined = joined_by_another(job)
    steps_on(job)
    went = job.rows("switch")[-1]["layout"]
    assert (went["pipe"], went["data"], went["boundaries"]) == (2, 2, [0, 3, 7]), went
    job.kill("b")
    last = job.settled(2, joined.generation)
    assert processes(last) == processes(first)
    steps_on(job)
    finish_together(job)
    check_history(job, static, kills=1)
