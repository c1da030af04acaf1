"""Copies of what one rank holds alone: each is with its own member and with its buddy, and is what the rank held."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Job
from tests.elastic.runs import finish, steps_on, training

SCRIPT = Path(__file__).with_name("keeping.py")
KINDS = {"master", "exp_avg", "exp_avg_sq"}


def keeping(folder: Path, stage: int, own: dict[str, Any] | None = None, block: Any = None, **given: Any) -> Job:
    """A job of `keeping.py`; own, block, given: see `runs.training`."""
    with_buddies = {"buddies": {"mode": "copy"}, **(block or {})}
    return training(folder, stage=stage, block=with_buddies, own=own, script=SCRIPT, nodes="1:4", **given)


def check_copies(job: Job, kinds: set[str]) -> dict[int, set[int]]:
    """Each copy is sound and what its rank held, of those kinds; world -> ranks of which somebody else had copies."""
    moments = {(row["world"], row["rank"], row["step"]): row["said"] for row in job.rows("moment")}
    kept: dict[int, set[int]] = {}
    for row in job.rows("copy"):
        assert row["sound"] and row["flip found"], row
        assert row["said"] == moments[row["world"], row["rank"], row["step"]], row
        if row["here"] != row["rank"]:
            kept.setdefault(row["world"], set()).add(row["rank"])
    assert {name.partition(" ")[0] for said in moments.values() for name in said} == kinds
    return kept


@pytest.mark.full  # `test_buddy_deaths` goes on from copies
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_copy_is_what_its_rank_held(tmp_path: Path, stage: int) -> None:
    """Two nodes, a third one comes, one goes: in each world every rank's copies are with its buddy, too."""
    job = keeping(tmp_path, stage)
    try:
        job.coordinator("coordinator")
        for node in ("a", "b"):
            job.node(node, is_host=0)
        first = job.settled(2)
        steps_on(job, 4)
        job.node("c", is_host=0)
        joined = job.settled(3, first.generation)
        steps_on(job, 4)
        of_last = [row["of"] for row in job.rows("protection")][-3:]
        assert all(one["is_protected"] and len(one["buddies"]) == 3 for one in of_last), of_last
        assert [one.protected for one in job.wait(job.status, "the status").members] == ["yes"] * 3
        job.kill("a", signal.SIGTERM)
        job.settled(2, joined.generation)
        steps_on(job, 4)
        finish(job, "b", "c", "coordinator")
        kept = check_copies(job, KINDS | ({"stale_grad", "weight"} if stage == 3 else set()))
        assert sorted(map(len, kept.values()))[-3:] == [2, 2, 3], kept
    finally:
        job.clean_up()


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 2e-4, "torch_adam": True}}}
OFFLOAD: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
OTHERS = {
    "bf16, stage 1": (1, {"bf16": {"enabled": True}}, set[str]()),
    "bf16, stage 3": (3, {"bf16": {"enabled": True}}, {"stale_grad", "weight"}),
    "Muon": (1, MUON, {"momentum_buffer"}),
    "offload": (2, {"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": False}, {"host_grad"}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_copies_of_others(tmp_path: Path, name: str) -> None:
    """Whatever is cut. Weights of 16 bits are not copied, unless they are frozen."""
    stage, own, more = OTHERS[name]
    job = keeping(tmp_path, stage, own, variables={"TORCHDYNAMO_DISABLE": "1"})  # Muon's step is compiled for a minute
    try:
        job.coordinator("coordinator")
        for node in ("a", "b"):
            job.node(node, is_host=0)
        job.settled(2)
        steps_on(job, 4)
        finish(job)
        kept = check_copies(job, KINDS | more)
        assert [len(ranks) for ranks in kept.values()][-1] == 2
    finally:
        job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_copies_of_stages_of_a_pipeline(tmp_path: Path, stage: int) -> None:
    """Two stages of one column each: every rank is alone with what it has, at stage 0, too."""
    block = {"layout": {"data": 1, "pipe": 2, "zero_stage": stage}}
    job = keeping(tmp_path, stage, block=block, workers=2, variables={"KIND": "pipeline", "STEPS": "8"})
    try:
        job.coordinator("coordinator")
        job.node("a", is_host=0)
        assert {node: job.code(node) for node in ("a", "coordinator")} == {"a": 0, "coordinator": 0}, job.logs()
        kept = check_copies(job, KINDS | {"weight"})
        assert [len(ranks) for ranks in kept.values()] == [2]
        of_weights = {name for row in job.rows("moment") for name in row["said"] if name.startswith("weight")}
        assert all(name.startswith("weight ('tensor'") for name in of_weights), "frozen ones"
    finally:
        job.clean_up()
