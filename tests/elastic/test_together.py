"""Several engines in a process whose members come and go: all of them change together, and none loses a sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import ROOT, Job, processes
from tests.elastic.kinds import KINDS
from tests.elastic.runs import (
    Static,
    check_history,
    finish,
    finish_together,
    first_leaves,
    node_of,
    second_joins,
    steps_on,
    variables,
    worker,
)

SCRIPT = ROOT / "tests" / "elastic" / "several.py"


def check_both(job: Job, static: Static, kills: int = 0, events: Sequence[str] = ("step", "beside")) -> None:
    """The history of each engine is that of a static run."""
    for event in events:
        assert len(job.rows(event)) > 3
        check_history(job, static, kills, event)


@pytest.fixture
def pair(train: Callable[..., Job]) -> Callable[..., Job]:
    """Makes a job of two engines a process; with its coordinator, if it has nodes."""

    def make(*nodes: str, beside: int | str = 3, style: str = "", **given: Any) -> Job:
        variables = {"BESIDE": str(beside), "STYLE": style, **given.pop("variables", {})}
        job = train(nodes="1:4", script=SCRIPT, variables=variables, **given)
        if nodes:
            job.coordinator("coordinator")
        for node in nodes:
            job.node(node, is_host=0)
        return job

    return make


@pytest.mark.full
@pytest.mark.parametrize("style", ["in turn", "zip", "smaller", "boundaries"])
def test_nodes_join_and_leave(pair: Callable[..., Job], static: Static, style: str) -> None:
    """Stages 1 and 3; the steps of both engines go on."""
    job = pair(style=style)
    first_leaves(job, second_joins(job))
    for event in ("switch", "switch beside"):
        assert {row["layout"]["data"] for row in job.rows(event)} == {1, 2}
    check_both(job, static)


@pytest.mark.full
@pytest.mark.parametrize("style", ["in turn", "smaller", "boundaries"])
def test_a_node_is_killed_without_zero(pair: Callable[..., Job], static: Static, style: str) -> None:
    """Both engines have all of their state in each process: the others go on with what they hold."""
    job = pair("a", "b", "c", stage=0, beside=0, style=style)
    joined = job.settled(3)
    job.kill(node_of(job, joined, 1))
    left = job.settled(2, joined.generation)
    assert processes(left) == [processes(joined)[0], processes(joined)[2]]
    job.wait(lambda: min(len(job.rows(event)) for event in ("step", "beside")) > 3, "four steps of both engines")
    finish(job, *[name for name in ("a", "b", "c") if job.processes[name].poll() is None], "coordinator")
    check_both(job, static, kills=1)


@pytest.mark.parametrize(
    "stages, style",
    [
        ((1, 3), "in turn"),
        pytest.param((0, 1), "in turn", marks=pytest.mark.full),
        pytest.param((1, 3), "smaller", marks=pytest.mark.full),
        pytest.param((1, 3), "boundaries", marks=pytest.mark.full),
    ],
)
def test_a_node_is_killed_with_zero(
    pair: Callable[..., Job], static: Static, tmp_path: Path, stages: tuple[int, int], style: str
) -> None:
    """What one engine has lost takes both back to one moment, also where the other one has everything."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    job = pair("a", "b", "c", stage=stages[0], beside=stages[1], style=style, block={"fallback": fallback})
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
    assert len(moments) == 2 and moments[0][2] == moments[1][2], moments
    assert style == "smaller" or moments[0][0] == moments[1][0], moments
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
def test_a_loop_that_waits_for_steps_of_another_engine_is_ended(pair: Callable[..., Job]) -> None:
    """After a death it would go on for ever: what it waits for comes with the next batch of the first engine."""
    job = pair("a", "b", "c", stage=0, beside=0, style="until")
    joined = job.settled(3)
    steps_on(job)
    killed = node_of(job, joined, 1)
    job.kill(killed)
    for name in {"a", "b", "c"} - {killed}:
        assert job.code(name) != 0
        said = (job.folder / f"{name}.log").read_text()
        assert "the script has asked engine 2 for" in said and "a number of batches, not of steps" in said


@pytest.mark.full
def test_one_engine_switches_by_itself(pair: Callable[..., Job], static: Static) -> None:
    """As its user asks, between two changes of members; the first engine keeps its layout, a newcomer finds both."""
    job = pair("a", style="switches")
    first = job.settled(1)
    job.node("b", is_host=0)  # not at once: then the first engine would have made no switch
    both = job.settled(2, first.generation)
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
    steps_on(job)
    finish(job, "a", "coordinator")
    check_both(job, static)


@pytest.mark.full
def test_three_engines(pair: Callable[..., Job], static: Static, tmp_path: Path) -> None:
    """In stages 1, 3 and 0: a node joins, another one is killed."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 3}
    job = pair("a", "b", beside="3,0", block={"fallback": fallback})
    both = job.settled(2)
    job.node("c", is_host=0)
    joined = job.settled(3, both.generation)
    steps_on(job)
    job.kill(node_of(job, joined, 0))
    left = job.settled(2, joined.generation)
    assert processes(left) == processes(joined)[1:]
    finish(job, *[name for name in ("a", "b", "c") if job.processes[name].poll() is None], "coordinator")
    check_both(job, static, kills=1, events=("step", "beside", "beside 3"))


@pytest.mark.full
@pytest.mark.parametrize("kind", list(KINDS))
def test_another_axis_beside_data(pair: Callable[..., Job], static: Static, tmp_path: Path, kind: str) -> None:
    """The first engine trains with tensor parallelism, experts or a pipeline, the other one with data alone."""
    here, variables = KINDS[kind], {"KIND": kind, "STEPS": "150"}
    first = Static(tmp_path / "static", [dict(here.layout), dict(here.beside)], dict(here.own), **variables)
    block = {
        "layout": {**here.layout, "zero_stage": 1},
        "fallback": {"path": str(tmp_path / "fallback"), "every_steps": 2},
    }
    job = pair(workers=2, block=block, own=dict(here.own), variables={"KIND": kind})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    one = job.settled(2)
    job.node("b", is_host=0)
    both = job.settled(4, one.generation)
    assert processes(both)[:2] == processes(one)
    steps_on(job)
    job.wait(lambda: len({row["step"] for row in job.rows("beside")}) > 6, "steps of the other engine")
    job.kill("b")
    left = job.settled(2, both.generation)
    assert processes(left) == processes(one) and left.changes[-1].change == "failure"
    steps_on(job)
    finish_together(job)
    check_history(job, first, kills=1)
    check_history(job, static, kills=1, event="beside")
