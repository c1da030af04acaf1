"""Jobs of stock torchrun agents whose members compute on the device, come, go and die.

As under NCCL a death raises nothing there: who waits for the dead waits until its communicators are aborted, and then
has garbage. So whatever was not known to be whole, and was used all the same, is in the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.agents import Job, processes
from tests.elastic.conftest import static, train, undisturbed
from tests.elastic.deaths import Deaths, Undisturbed
from tests.elastic.runs import (
    Static,
    check_history,
    finish,
    finish_together,
    first_leaves,
    gated,
    node_of,
    open_gate,
    second_joins,
    steps_on,
    variables,
    worker,
)
from tests.elastic.test_buddy_deaths import INSTANTS, OF_STAGE_3
from tests.elastic.test_hangs import stand_still, two
from tests.elastic.test_switch_faults import go_through

__all__ = ["static", "train", "undisturbed"]

pytestmark = pytest.mark.usefixtures("lab_built")

SCRIPT = Path(__file__).with_name("elastic_training.py")


@pytest.mark.parametrize("way", ["nccl", pytest.param("auto", marks=pytest.mark.full)])
def test_nodes_join_and_the_first_one_leaves(train: Callable[..., Job], static: Static, way: str) -> None:
    job = train(nodes="1:4", stage=2, block={"transport": way}, script=SCRIPT)
    first_leaves(job, second_joins(job))
    check_history(job, static)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "instant"),
    [(stage, instant) for stage in (1, 2, 3) for instant in ("reduction", *(OF_STAGE_3 if stage == 3 else INSTANTS))],
)
def test_one_dies_and_a_spare_takes_its_place(
    tmp_path: Path, undisturbed: Undisturbed, stage: int, instant: str
) -> None:
    """All go on from copies; to the bit as if nobody had died."""
    deaths = Deaths(tmp_path, stage, {"b": f"{instant} dies kill"}, script=SCRIPT)
    try:
        deaths.check_spare(undisturbed, most_again=2 if instant == "ship" else 1)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("instant", ["reduction", "forward", "backward", "step"])
def test_one_of_three_replicas_dies(tmp_path: Path, static: Static, instant: str) -> None:
    """Without ZeRO the living have all of it, and go on as they are."""
    deaths = Deaths(tmp_path, 0, {"b": f"{instant} dies kill"}, spares=0, script=SCRIPT, least=1)
    try:
        deaths.tell()
        left = deaths.job.settled(2, deaths.first.generation)
        assert set(processes(left)) < set(processes(deaths.first)) and left.changes[-1].change == "failure"
        finish(deaths.job)
        check_history(deaths.job, static, kills=1)
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_replicas_that_are_in_doubt(tmp_path: Path, static: Static) -> None:
    """The norm of the step was reduced, and whether all had it nobody can say any more: all go back to a checkpoint."""
    fallback = {"path": str(tmp_path / "fallback"), "every_steps": 2}
    where = tmp_path / "job"
    where.mkdir()
    deaths = Deaths(where, 0, {"b": "update dies kill"}, spares=0, block={"fallback": fallback}, script=SCRIPT, least=1)
    try:
        deaths.tell()
        deaths.job.settled(2, deaths.first.generation)
        steps_on(deaths.job)
        finish(deaths.job)
        check_history(deaths.job, static, kills=1)
    finally:
        deaths.job.clean_up()


KILLS = [
    (role, stage, phases)
    for role, stage in (("joiner", 1), ("other", 1), ("other", 0), ("first", 0))
    for phases in (("prepare", "meet", "drain"), ("connect", "rebuild", "move"), ("verify", "commit"))
]
IN_BATCHES = [("joiner", 1, ("move",)), ("other", 1, ("move",))]


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "stage", "phases", "way"),
    [*((*kill, "auto") for kill in KILLS), *((*kill, "nccl") for kill in IN_BATCHES)],
)
def test_one_is_killed_in_a_switch(
    train: Callable[..., Job], static: Static, tmp_path: Path, role: str, stage: int, phases: tuple[str, ...], way: str
) -> None:
    """The others wait for its part, on the device, until they hear of it. While a switch is prepared they train, so a
    death may leave a replica in doubt, too. Once all have met nothing is, and a newcomer has nothing that they lack.
    """
    has_met = role == "joiner" and not {"prepare", "meet", "drain", "commit"} & {*phases}
    can_lose = "prepare" in phases or (stage > 0 and not has_met)
    fallback = {"fallback": {"path": str(tmp_path / "fallback"), "every_steps": 2}} if can_lose else {}
    job = train(nodes="1:9", stage=stage, block={"transport": way, **fallback}, script=SCRIPT)
    go_through(job, role, [f"{role} {phase} kill" for phase in phases])
    finish(job)
    check_history(job, static, kills=len(phases))
    if has_met:
        made = [(row["pid"], row["step"]) for row in job.rows("step")]
        assert len(made) == len(set(made)), "a step was made twice"


@pytest.mark.full
def test_one_dies_as_the_first_engine_is_made(train: Callable[..., Job]) -> None:
    """The others wait for its part of a broadcast; the start ends at once with an error, as on a CPU."""
    job = train(nodes="3:3", script=SCRIPT)
    (job.folder / "dies").write_text("-1")
    job.coordinator("coordinator")
    for node in "abc":
        gated(job, node, "gate-all", **({"FAULT": "broadcast dies kill"} if node == "b" else {}))
        worker(job, node)
    open_gate(job, "gate-all")
    assert {job.code(node) for node in "ac"} == {1}, job.logs()
    assert "communicators were aborted" in job.logs()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "axis"), [("pipeline", "pipe"), ("tensor", "tensor")])
def test_one_dies_beside_other_axes(train: Callable[..., Job], kind: str, axis: str) -> None:
    """Two columns; three members are left, of whom two train on from copies, and one waits."""
    layouts = {"2": {"data": 1, axis: 2}, "4": {"data": 2, axis: 2}}
    block = {"layout": {**layouts["2"], "zero_stage": 1}, "layouts": layouts, "buddies": {"mode": "copy"}}
    job = train(nodes="2:4", block=block, variables={"STEP_SECONDS": "0.3", "KIND": kind}, script=SCRIPT)
    job.coordinator("coordinator")
    for node in "ab":
        job.node(node, is_host=0)
    job.settled(2)
    for node in "cd":
        job.node(node, is_host=0)
    job.wait(lambda: any(row["layout"]["data"] == 2 for row in job.rows("switch")), "two columns")
    steps_on(job, 6)
    wide = job.status()
    assert wide is not None and len(wide.ranks) == 4
    job.kill(node_of(job, wide, 3))
    job.wait(lambda: "from copies that members keep of each other" in job.logs(), "a restoration")
    steps_on(job, 4)
    finish_together(job)
    for pid in {row["pid"] for row in job.rows("step")}:
        made = [row["step"] for row in job.rows("step") if row["pid"] == pid]
        assert len(made) - len(set(made)) <= 2, made


@pytest.mark.full
def test_a_model_without_memory(train: Callable[..., Job]) -> None:
    """It is drawn where the job starts; who joins has its values from there."""
    block = {"layout": {"data": 1, "zero_stage": 3}}
    job = train(nodes="1:2", stage=3, block=block, variables={"KIND": "meta"}, script=SCRIPT)
    joined = second_joins(job)
    steps_on(job)
    finish_together(job)
    steps = [row for row in job.rows("step") if row["generation"] >= joined.generation]
    assert len({row["pid"] for row in steps}) == 2
    losses = [loss for row in job.rows("step") for loss, _ in row["parts"]]
    assert losses and all(0 < loss < 2 * losses[0] for loss in losses), losses


@pytest.mark.full
def test_one_stands_still_for_a_while(train: Callable[..., Job], static: Static) -> None:
    """The other one waits for its device; past the limit both go back to copies, and train on."""
    job, generation = two(train, kind=Job, script=SCRIPT, stage=2, block={"buddies": {"mode": "copy"}})
    stand_still(job, "b")
    job.settled(2, generation)
    steps_on(job)
    finish(job)
    check_history(job, static)
    assert "the main thread here is in a collective of the device, " in job.logs()


def test_a_device_that_takes_nothing_any_more(train: Callable[..., Job]) -> None:
    """Its process ends with a code of its own, and its agent starts another one, which comes in its place."""
    job = train(nodes="1:2", stage=0, variables={"STEP_SECONDS": "0.3"}, script=SCRIPT)
    job.coordinator("coordinator")
    job.node("a", is_host=0)
    first = job.settled(1)
    with variables(job, FAULT="forward breaks break"):
        job.node("b", "--max-restarts=1", is_host=0)
    both = job.settled(2, first.generation)
    (job.folder / "breaks").write_text("0")
    job.wait(lambda: not (job.folder / "breaks").exists(), "the error")
    again = job.settled(2, both.generation)
    assert processes(again)[0] == processes(first)[0] and processes(again)[1] != processes(both)[1]
    assert "ends with code 88: its accelerator takes nothing any more: lab: an earlier access" in job.logs()
    finish(job)
