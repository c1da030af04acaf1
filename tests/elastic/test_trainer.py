"""Trainer of Hugging Face where nodes join, leave and die; stock torchrun agents."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import ROOT, Job
from tests.elastic.runs import training

SCRIPT = ROOT / "tests" / "elastic" / "hf_training.py"
ANSWERING = ROOT / "tests" / "elastic" / "answering.py"
BUDDIES = {"buddies": {"mode": "copy"}}
QUICK = {"STEP_SECONDS": "0.2"}


def logged(job: Job) -> dict[int, dict[str, Any]]:
    """Rank 0's rows with a loss, by step: none is there twice, none is left out."""
    rows = [row for row in job.rows("log") if "loss" in row]
    steps = [row["step"] for row in rows]
    assert sorted(steps) == list(range(1, len(steps) + 1)), steps
    return {row["step"]: row for row in rows}


def check_steps(job: Job, every: int = 10) -> None:
    """All that made a step believed the same of the world and of early stopping, and ended with the best model."""
    rows: dict[tuple[int, int], list[Any]] = {}
    for row in job.rows("step"):
        rows.setdefault((row["generation"], row["step"]), []).append(row)
    for (_, step), made in rows.items():
        assert {row["ranks"] for row in made} == {len(made[0]["members"])}, (step, made)
        assert len({row["patience"] for row in made}) == 1, (step, made)
        assert sorted({row["rank"] for row in made}) == sorted(row["rank"] for row in made), (step, made)
    ends = job.rows("end")
    assert ends and all(row["is_best"] and row["best"] == f"checkpoint-{every}" for row in ends), ends


def wait_for_steps(job: Job, count: int) -> None:
    """So many more of the present world."""
    world = job.settled(len(job.rows("step")[-1]["members"])) if job.rows("step") else job.settled(1)
    begin = job.steps(world.generation)
    job.wait(lambda: job.steps(world.generation) >= begin + count, f"{count} steps")


def test_nodes_join_and_the_first_one_leaves(train: Callable[..., Job]) -> None:
    """By SIGTERM; newcomers log on from there, with the job's state, and load the best model with the others."""
    job = train(nodes="1:4", stage=1, block=BUDDIES, script=SCRIPT, variables={**QUICK, "EVERY": "3"})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    job.wait(lambda: job.steps(first.generation) > 7, "steps of one, and two evaluations")
    job.node("b", is_host=0)
    both = job.settled(2, first.generation)
    job.wait(lambda: job.steps(both.generation) > 8, "steps of both")
    job.node("c", is_host=0)
    three = job.settled(3, both.generation)
    job.kill("a", signal.SIGTERM)
    last = job.settled(2, three.generation)
    job.wait(lambda: job.steps(last.generation) > 4, "steps of the other ones")
    job.end(ahead=4)
    assert {node: job.code(node) for node in "bc"} == {"b": 0, "c": 0}, job.logs()
    logged(job)
    check_steps(job, every=3)


@pytest.mark.full
@pytest.mark.parametrize("how", ["", "slow evaluation", "slow save"])
@pytest.mark.parametrize("stage", [1, 3])
def test_one_dies(train: Callable[..., Job], how: str, stage: int) -> None:
    """By SIGKILL in a step, in an evaluation or in a save: nothing is lost, and what is logged has no hole."""
    job = train(nodes="2:4", stage=stage, block=BUDDIES, script=SCRIPT, variables={**QUICK, "HOW": how})
    job.coordinator("coordinator")
    for node in ("a", "b", "c"):
        job.node(node, is_host=0)
    three = job.settled(3)
    job.wait(lambda: job.steps(three.generation) > 12, "steps of three")
    if how:
        event = "saving" if how == "slow save" else "evaluating"
        seen = len(job.rows(event))
        job.wait(lambda: len(job.rows(event)) > seen, event)
    job.kill("b")
    two = job.settled(2, three.generation)
    job.wait(lambda: job.steps(two.generation) > 12, "steps of two")
    job.end(ahead=6)
    codes = {node: job.code(node) for node in ("a", "c")}
    assert codes == {"a": 0, "c": 0}, job.logs()
    logged(job)
    check_steps(job)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_answers_to_prompts_survive_a_death(train: Callable[..., Job], tmp_path: Path, stage: int) -> None:
    """A node dies while completions are made, and one comes; the gradients are those of a job without events."""
    job = train(nodes="1:3", stage=stage, block=BUDDIES, script=ANSWERING)
    job.coordinator("coordinator")
    for node in ("a", "b"):
        job.node(node, is_host=0)
    two = job.settled(2)
    job.wait(lambda: job.steps(two.generation) > 3, "steps of two")
    seen = len(job.rows("answering"))
    job.wait(lambda: len(job.rows("answering")) > seen, "completions")
    job.kill("b")
    one = job.settled(1, two.generation)
    job.wait(lambda: job.steps(one.generation) > 2, "steps of one")
    job.node("c", is_host=0)
    both = job.settled(2, one.generation)
    job.wait(lambda: job.steps(both.generation) > 3, "steps of two again")
    job.end(ahead=3)
    assert {node: job.code(node) for node in "ac"} == {"a": 0, "c": 0}, job.logs()
    rows = {row["step"]: row for row in job.rows("log")}
    assert sorted(rows) == list(range(1, len(rows) + 1)) and len(rows) == len(job.rows("log"))
    (tmp_path / "quiet").mkdir()
    quiet = training(tmp_path / "quiet", nodes="1:1", stage=stage, script=ANSWERING, variables={"SECONDS_EACH": "0"})
    try:
        quiet.coordinator("coordinator")
        quiet.node("a", is_host=0)
        quiet.wait(lambda: len(quiet.rows("log")) >= len(rows), "as many steps")
        quiet.end(ahead=1)
        assert quiet.code("a") == 0, quiet.logs()
        alone = {row["step"]: row for row in quiet.rows("log")}
    finally:
        quiet.clean_up()
    for name in ("reward", "grad_norm"):
        expected = [alone[step][name] for step in sorted(rows)]
        assert [rows[step][name] for step in sorted(rows)] == pytest.approx(expected, rel=1e-3), name
