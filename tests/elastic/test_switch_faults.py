"""A node is killed, or told to go, in the middle of a switch, in every phase of it: real agents, a real engine.

One job goes through several phases: a chain of nodes, each of which comes when the one before it has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.runs import Static, check_history, finish, gated, open_gate, worker

EARLY = ("prepare", "meet", "drain")
LATE = ("rebuild", "move", "verify", "commit")
TERMS = ("prepare", "meet", "move", "commit")
KILLS = [
    pytest.param("first", 0, ("move",), marks=pytest.mark.full, id="first in a move"),
    *(
        pytest.param(role, stage, phases, marks=pytest.mark.full, id=f"{role}, stage {stage}, {name}")
        for role, stage in (("joiner", 1), ("other", 1), ("other", 0), ("first", 0))
        for name, phases in (("early", EARLY), ("late", LATE))
    ),
]


@pytest.mark.parametrize(("role", "stage", "phases"), KILLS)
def test_kill(
    train: Callable[..., Job], static: Static, tmp_path: Path, role: str, stage: int, phases: tuple[str, ...]
) -> None:
    """With ZeRO, who takes state along sends all back to a checkpoint; without, and where only a joiner dies before the
    commit, no step is made twice."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 2}
    job = train(nodes="1:9", stage=stage, block={"fallback": fallback} if stage else {})
    go_through(job, role, [f"{role} {phase} kill" for phase in phases])
    finish(job)
    check_history(job, static, kills=len(phases))
    if stage == 0 or (role == "joiner" and "commit" not in phases):
        made = [(row["pid"], row["step"]) for row in job.rows("step")]
        assert len(made) == len(set(made)), "a step was made twice"


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "phases"),
    [("joiner", TERMS), ("other", TERMS), *(("first", (phase,)) for phase in TERMS)],  # who follows as rank 0 is open
)
def test_sigterm(train: Callable[..., Job], static: Static, role: str, phases: tuple[str, ...]) -> None:
    """The switch goes through; then the node hands over what it has, and goes. Nothing is lost."""
    job = train(nodes="1:9")
    go_through(job, role, [f"{role} {phase} term" for phase in phases])
    status = job.status()
    assert status is not None and all(change.change == "planned" for change in status.changes), status.changes
    finish(job)
    check_history(job, static)
    made = [(row["pid"], row["step"]) for row in job.rows("step")]
    assert len(made) == len(set(made)), "a step was made twice"


def go_through(job: Job, role: str, faults: list[str]) -> None:
    """A world of two; for each fault a node comes, and one goes: itself, or one that was there before."""
    job.coordinator("coordinator")
    is_joiner = role == "joiner"
    settled = 2 if is_joiner else 1 if role == "other" else 0  # so many have no fault
    told = ["", "", *faults] if is_joiner else [*[""] * settled, *faults, *[""] * (2 - settled)]
    names = [f"n{number}" for number in range(len(told))]
    for name, fault in zip(names, told, strict=True):
        gated(job, name, **({"FAULT": fault} if fault else {}))
    generation = 0
    for number, name in enumerate(names):
        open_gate(job, name)
        if number < 2:
            generation = job.settled(number + 1, generation).generation
            world = [worker(job, one) for one in names[: number + 1]]
            continue
        comes = worker(job, name)
        gone = number if is_joiner else number - 1 if role == "other" else number - 2
        job.code(names[gone])
        expected = world if is_joiner else [world[0], comes] if role == "other" else [world[1], comes]
        status = job.settled(2, generation)
        assert processes(status) == expected, f"{faults}: {names[gone]} has gone"
        generation, world = status.generation, expected
