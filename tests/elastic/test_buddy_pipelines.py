"""A stage of a pipeline dies, and a spare takes its place: with copies after each step one is made again at most.

All ranks of a pipeline have the loss of the whole batch. So all who make a step, the dead too, have to say the loss of
a run in which nobody dies, bit for bit. The disk is read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Job, Row, processes
from tests.elastic.deaths import STEPS, Deaths
from tests.elastic.runs import Losses, Static, finish_together, node_of, steps_on

NODES = ("a", "b", "c", "d")
TWO_BY_TWO = {"data": 2, "pipe": 2, "zero_stage": 1}
UNEVEN = {**TWO_BY_TWO, "shares": (4, 8)}
"""Samples of each pipeline: in micro-batches of 4, so the second one has two of them, and the first has one."""
FOUR = {"data": 1, "pipe": 4, "zero_stage": 1}
"""Here each rank's buddy is in another stage; in pairs of pipelines it is in the same one."""
CLIPPED, UNCLIPPED = {"gradient_clipping": 1.0}, {"gradient_clipping": 0.0}
FIRST, EVEN = "tied_modules.,1.,2.,3.", {"gradient_clipping": 1.0, "pipeline": {"partition": "uniform"}}
"""Layers that are frozen in some runs: with even stages all of the first one or, of four, of all but the third."""
COPIES = {"mode": "copy"}
INSTANTS = ("layer", "backward of a stage", "reduction", "loss", "norm", "update", "gather", "boundary")


class Undisturbed:
    """Losses of runs in which nobody dies."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, dict[str, Losses]()

    def of(self, layout: Mapping[str, Any], own: dict[str, Any], frozen: str = "") -> Losses:
        """By step."""
        name = f"{layout} {own} {frozen}"
        if name not in self._runs:
            where, more = self._folder / str(len(self._runs)), {"STEPS": str(STEPS), "FROZEN": frozen}
            self._runs[name] = Static(where, [dict(layout)], own, KIND="pipeline", **more).losses
        return self._runs[name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def die(
    folder: Path, layout: Mapping[str, Any], own: dict[str, Any], rank: int, instant: str, frozen: str = ""
) -> list[Row]:
    """The steps that all have written where a rank dies at an instant."""
    faults = {node: f"{instant} dies-{node} kill" for node in NODES}
    block = {"layout": dict(layout), "buddies": COPIES}
    more = {"KIND": "pipeline", "DISK": "read-only", "FROZEN": frozen}
    deaths = Deaths(folder, 1, faults, NODES, block=block, own=own, **more)
    try:
        deaths.tell(f"dies-{node_of(deaths.job, deaths.first, rank)}")
        settled = deaths.job.settled(4, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        steps_on(deaths.job)
        finish_together(deaths.job)
        return deaths.job.rows("step")
    finally:
        deaths.job.clean_up()


def check(rows: list[Row], wanted: Losses, most_again: int) -> None:
    """Every loss is the right one; no member leaves a step out, or makes more than so many again."""
    assert {row["step"] for row in rows} == set(range(1 + max(row["step"] for row in rows)))
    wrong = [row for row in rows if row["loss"] != wanted[row["step"]]]
    assert not wrong, wrong[:3]
    for pid in {row["pid"] for row in rows}:
        made = [row["step"] for row in rows if row["pid"] == pid]
        assert sorted(set(made)) == list(range(made[0], made[-1] + 1)), made
        assert len(made) - len(set(made)) <= most_again, made


CASES = [
    *(
        (instant, number % 4, TWO_BY_TWO, UNCLIPPED if number % 2 else CLIPPED)
        for number, instant in enumerate(INSTANTS)
    ),
    *((instant, number, FOUR, CLIPPED) for number, instant in enumerate(("norm", "update", "gather", "boundary"))),
]


@pytest.mark.full
@pytest.mark.parametrize(("instant", "rank", "layout", "own"), CASES)
def test_one_step_is_lost_at_most(
    tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int, layout: dict[str, Any], own: dict[str, Any]
) -> None:
    """What follows is as if nobody had died."""
    rows = die(tmp_path, layout, own, rank, instant)
    check(rows, undisturbed.of(layout, own), most_again=1)


@pytest.mark.full
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", [TWO_BY_TWO, FOUR])
@pytest.mark.parametrize("instant", ["layer", "norm", "gather"])
def test_stages_without_anything_to_train_die(
    tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int, layout: dict[str, Any]
) -> None:
    """And others beside them: a member with nothing to step is a buddy and a ward, too."""
    if (instant, rank, layout) == ("layer", 3, FOUR):  # this stage has words alone
        instant = "reduction"
    rows = die(tmp_path, layout, EVEN, rank, instant, FIRST)
    check(rows, undisturbed.of(layout, EVEN, FIRST), most_again=1)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "instant"), list(enumerate(["layer", "reduction", "update", "boundary"])))
def test_pipelines_of_different_lengths_die(tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int) -> None:
    """The one that has most micro-batches, and the other one."""
    rows = die(tmp_path, UNEVEN, UNCLIPPED, rank, instant)
    check(rows, undisturbed.of(UNEVEN, UNCLIPPED), most_again=1)


@pytest.mark.full
def test_a_node_has_a_stage_of_frozen_weights_alone(train: Callable[..., Job]) -> None:
    """Each rank alone could be spared, and a node could not: that is said, and the job is not called protected."""
    block = {"layout": {"data": 2, "pipe": 2, "zero_stage": 1}, "buddies": {}}
    job = train(nodes="1:2", workers=2, stage=1, block=block, variables={"KIND": "pipeline"})
    job.coordinator("coordinator")
    for node in "ab":
        job.node(node, is_host=0)
    job.settled(4)
    steps_on(job, 5)
    assert {one.protected for one in job.wait(job.status, "the status").members} == {"no"}
    said = "the frozen weights of one place are all on one node, and no copy has them; a death ends the job"
    assert sum((job.folder / f"{node}.log").read_text().count(said) for node in "ab") == 1
    finish_together(job)
