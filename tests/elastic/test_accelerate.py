"""A loop with Accelerate where nodes join, leave and die; stock torchrun agents."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.elastic.agents import ROOT, Job
from tests.integrations.loops import EVALUATED

SCRIPT = ROOT / "tests" / "elastic" / "hf_loop.py"
BUDDIES = {"buddies": {"mode": "copy"}}
QUICK = {"STEP_SECONDS": "0.2"}
SAMPLES_OF_A_SCHEDULE = 4
"""Processes whose DataLoaders would give a global batch at once: the schedule steps once for each of them."""


def check(job: Job, evaluations: int) -> None:
    """No step is left out, and one that was made again is the same; rates, worlds and evaluations are right."""
    logged = job.rows("log")
    losses: dict[int, set[float]] = {}
    for row in logged:
        losses.setdefault(row["step"], set()).add(round(row["loss"], 4))
    assert sorted(losses) == list(range(1, len(losses) + 1))
    assert all(max(seen) - min(seen) <= 2e-4 for seen in losses.values()), losses
    for row in job.rows("step"):
        assert row["ranks"] == len(row["members"]) and 0 <= row["rank"] < row["ranks"], row
        assert row["rate"] == pytest.approx(1e-3 / (1 + SAMPLES_OF_A_SCHEDULE * row["step"]), rel=1e-9), row
    whole = [row["seen"] for row in job.rows("evaluated") if row["is_whole"]]
    assert len(whole) >= evaluations and all(seen == list(range(EVALUATED)) for seen in whole)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["", "slow evaluation"])
def test_a_node_joins_and_another_one_dies(train: Callable[..., Job], how: str, stage: int) -> None:
    """By SIGKILL, in a step or in an evaluation; the first node leaves by SIGTERM then, and the newcomer goes on."""
    job = train(nodes="1:4", stage=stage, block=BUDDIES, script=SCRIPT, variables={**QUICK, "HOW": how})
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    job.node("b", is_host=0)
    first = job.settled(2)
    job.wait(lambda: job.steps(first.generation) > 6, "steps of two")
    job.node("c", is_host=0)
    three = job.settled(3, first.generation)
    job.wait(lambda: job.steps(three.generation) > 9, "steps of three")
    if how:
        seen = len(job.rows("evaluating"))
        job.wait(lambda: len(job.rows("evaluating")) > seen, "an evaluation")
    job.kill("b")
    two = job.settled(2, three.generation)
    job.wait(lambda: job.steps(two.generation) > 6, "steps of two")
    job.kill("a", signal.SIGTERM)
    last = job.settled(1, two.generation)
    job.wait(lambda: job.steps(last.generation) > 6, "steps of the last one")
    job.end(ahead=4)
    assert job.code("c") == 0, job.logs()
    check(job, 3)
