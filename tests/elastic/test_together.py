"""Several engines in a process whose members come and go: all of them change together, and none loses a sample."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import ROOT, Job, processes
from tests.elastic.runs import (
    Static,
    check_history,
    finish,
    node_of,
    second_joins_first_leaves,
    steps_on,
    variables,
    worker,
)

SCRIPT = ROOT / "tests" / "elastic" / "pairs.py"


def check_both(job: Job, static: Static, kills: int = 0) -> None:
    """The history of each engine is that of a static run."""
    for event in ("step", "beside"):
        assert len(job.rows(event)) > 3
        check_history(job, static, kills, event)


@pytest.fixture
def pair(train: Callable[..., Job]) -> Callable[..., Job]:
    """Makes a job of two engines a process; with its coordinator, if it has nodes."""

    def make(*nodes: str, beside: int = 3, style: str = "", **given: Any) -> Job:
        job = train(nodes="1:4", script=SCRIPT, variables={"BESIDE": str(beside), "STYLE": style}, **given)
        if nodes:
            job.coordinator("coordinator")
        for node in nodes:
            job.node(node, is_host=0)
        return job

    return make


@pytest.mark.full
def test_nodes_join_and_leave(pair: Callable[..., Job], static: Static) -> None:
    """Stages 1 and 3; the steps of both engines go on."""
    job = pair()
    second_joins_first_leaves(job)
    for event in ("switch", "switch beside"):
        assert {row["layout"]["data"] for row in job.rows(event)} == {1, 2}
    check_both(job, static)


@pytest.mark.full
def test_a_node_is_killed_without_zero(pair: Callable[..., Job], static: Static) -> None:
    """Both engines have all of their state in each process: the others go on with what they hold."""
    job = pair("a", "b", "c", stage=0, beside=0)
    joined = job.settled(3)
    job.kill(node_of(job, joined, 1))
    left = job.settled(2, joined.generation)
    assert processes(left) == [processes(joined)[0], processes(joined)[2]]
    finish(job, *[name for name in ("a", "b", "c") if job.processes[name].poll() is None], "coordinator")
    check_both(job, static, kills=1)


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 1), marks=pytest.mark.full)])
def test_a_node_is_killed_with_zero(
    pair: Callable[..., Job], static: Static, tmp_path: Path, stages: tuple[int, int]
) -> None:
    """What one engine has lost takes both back to one moment, also where the other one has everything."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    job = pair("a", "b", "c", stage=stages[0], beside=stages[1], block={"fallback": fallback})
    joined = job.settled(3)
    steps_on(job)
    job.wait(lambda: len(job.rows("beside")) > 15, "a checkpoint")
    job.kill(node_of(job, joined, 1))
    left = job.settled(2, joined.generation)
    assert processes(left) == [processes(joined)[0], processes(joined)[2]]
    survivor = node_of(job, left, 0)
    finish(job, *[name for name in ("a", "b", "c") if job.processes[name].poll() is None], "coordinator")
    log = (job.folder / f"{survivor}.log").read_text()
    moments = re.findall(r"restored step (\d+) from .*?(fallback|fallback-beside)/(\S+)", log)
    assert len(moments) == 2 and moments[0][0] == moments[1][0] and moments[0][2] == moments[1][2], moments
    check_both(job, static)


@pytest.mark.full
def test_one_fails_and_neither_changes(pair: Callable[..., Job], static: Static) -> None:
    """What the second engine cannot do the first does not do either; the next attempt takes both along."""
    job = pair("a", "b")
    both = job.settled(2)
    leads = node_of(job, both, 0)
    with variables(job, FAULT="joiner verify fail 2"):
        job.node("c", is_host=0)
    job.settled(3, both.generation)
    finish(job, "a", "b", "c", "coordinator")
    check_both(job, static)
    said = [line for line in (job.folder / f"{leads}.log").read_text().splitlines() if "rolled back after" in line]
    assert len(said) == 2 and all("told to fail" in line for line in said), said


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", ["joiner move kill 2", "other verify kill 2", "other commit kill 1", "first move kill 2"]
)
def test_a_node_is_killed_in_a_change(pair: Callable[..., Job], static: Static, tmp_path: Path, fault: str) -> None:
    """Between the two engines of a process, before and after the record."""
    job = pair(stage=1, beside=3, block={"fallback": {"path": str(tmp_path / "fallback"), "every_steps": 2}})
    job.coordinator("coordinator")
    killed = "abc"[("first", "other", "joiner").index(fault.split()[0])]
    generation, pids = 0, dict[str, int]()
    for number, name in enumerate("abc", start=1):
        with variables(job, **({"FAULT": fault} if name == killed else {})):
            job.node(name, is_host=0)
        pids[name] = worker(job, name)
        if number < 3:
            generation = job.settled(number, generation).generation
            steps_on(job)
    job.code(killed)
    del pids[killed]
    assert sorted(processes(job.settled(2, generation))) == sorted(pids.values())
    steps_on(job)
    finish(job, *pids, "coordinator")
    check_both(job, static, kills=1)


@pytest.mark.full
def test_what_is_refused(pair: Callable[..., Job], static: Static) -> None:
    """By name; the first engine goes on alone."""
    job = pair("a", style="refused")
    job.wait(lambda: len(job.rows("refused")) == 3, "all to be refused")
    with variables(job, STYLE=""):
        job.node("more", is_host=0)
    assert job.code("more") != 0
    assert "it makes engine 2, and the job's processes have 1" in (job.folder / "more.log").read_text()
    finish(job, "a", "coordinator")
    said = {row["what"]: row["said"] for row in job.rows("refused")}
    assert "pipeline" in said["pipeline"] and "dynatrain.fallback" in said["fallback"]
    assert "make all engines before the first batch" in said["late"]
    check_history(job, static)


@pytest.mark.full
def test_a_loop_that_asks_another_engine_first_is_refused(pair: Callable[..., Job]) -> None:
    """On those that start the job already: newcomers would wait in another place than the others stand in."""
    job = pair("a", style="other first")
    assert job.code("a") != 0
    log = (job.folder / "a.log").read_text()
    assert "the script asks engine 2 for a batch ('train') before that one" in log and not job.rows("step")


@pytest.mark.full
def test_one_engine_switches_by_itself(pair: Callable[..., Job], static: Static) -> None:
    """As its user asks, between two changes of members; the first engine keeps its layout, a newcomer finds both."""
    job = pair("a", "b", style="switches")
    both = job.settled(2)
    job.wait(lambda: len(job.rows("asked")) == 2, "the switch")
    steps_on(job)
    assert {row["layout"]["zero_stage"] for row in job.rows("switch")} == {1}
    job.node("c", is_host=0)
    job.settled(3, both.generation)
    last = job.rows("switch beside")[-1]["layout"]
    assert (last["data"], last["zero_stage"]) == (3, 2)
    finish(job, "a", "b", "c", "coordinator")
    check_both(job, static)


@pytest.mark.full
def test_a_process_with_fewer_engines_is_refused(pair: Callable[..., Job], static: Static) -> None:
    """The job goes on without it."""
    job = pair("a")
    job.settled(1)
    with variables(job, STYLE="fewer"):
        job.node("fewer", is_host=0)
    assert job.code("fewer") != 0
    assert "it has made 1 engines, and the job's processes 2" in (job.folder / "fewer.log").read_text()
    finish(job, "a", "coordinator")
    check_both(job, static)
