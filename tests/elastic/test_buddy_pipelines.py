"""A stage of a pipeline dies, and a spare takes its place: no step is lost where steps are replayed.

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
REPLAY = {"mode": "replay", "verify_every_steps": 4}
MADE = ("decision", "replica", "update", "gather")
"""In these all living know what the step does, and make it without the dead one; after the norm they may, or not."""
BEFORE = ("layer", "backward of a stage", "reduction", "loss", "before replay ships", "replay ships", "norm")
INSTANTS = (*BEFORE, *MADE, "after replay", "boundary")
IN_COPIES = ("layer", "backward of a stage", "reduction", "loss", "norm", "update", "gather", "boundary")


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
    folder: Path,
    buddies: dict[str, Any],
    layout: Mapping[str, Any],
    own: dict[str, Any],
    rank: int,
    instant: str,
    frozen: str = "",
) -> tuple[int, str, list[Row]]:
    """(the step in which a rank dies at an instant, what all have logged, the steps that they have written)."""
    faults = {node: f"{instant} dies-{node} kill" for node in NODES}
    block = {"layout": dict(layout), "buddies": buddies}
    more = {"KIND": "pipeline", "DISK": "read-only", "FROZEN": frozen}
    deaths = Deaths(folder, 1, faults, NODES, block=block, own=own, **more)
    try:
        step = deaths.tell(f"dies-{node_of(deaths.job, deaths.first, rank)}")
        settled = deaths.job.settled(4, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        steps_on(deaths.job)
        finish_together(deaths.job)
        return step, deaths.log(*NODES, *deaths.spares), deaths.job.rows("step")
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


QUICK_REPLAY = (("replica", 3, TWO_BY_TWO, CLIPPED),)
IN_REPLAY = [
    *((instant, number % 4, TWO_BY_TWO, CLIPPED) for number, instant in enumerate(INSTANTS)),
    *((instant, (number + 2) % 4, TWO_BY_TWO, UNCLIPPED) for number, instant in enumerate(INSTANTS)),
    *((instant, number, FOUR, CLIPPED) for number, instant in enumerate(("norm", "update", "gather", "boundary"))),
]


@pytest.mark.parametrize(
    ("instant", "rank", "layout", "own"),
    [*QUICK_REPLAY, *(pytest.param(*case, marks=pytest.mark.full) for case in IN_REPLAY if case not in QUICK_REPLAY)],
)
def test_no_step_is_lost(
    tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int, layout: dict[str, Any], own: dict[str, Any]
) -> None:
    """Nobody makes a step again that any of the living has made; what follows is as if nobody had died."""
    step, said, rows = die(tmp_path, REPLAY, layout, own, rank, instant)
    possible = [step + 1] if instant in MADE else [step, step + 1] if instant == "norm" else [step]
    assert any(f"restored step {each} from copies" in said for each in possible), said
    check(rows, undisturbed.of(layout, own), most_again=0)


@pytest.mark.full
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", [TWO_BY_TWO, FOUR])
@pytest.mark.parametrize("instant", ["layer", "norm", "replica", "gather"])
def test_stages_without_anything_to_train_die(
    tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int, layout: dict[str, Any]
) -> None:
    """And others beside them: whoever has nothing to step is a buddy and a ward, too."""
    if (instant, rank, layout) == ("layer", 3, FOUR):  # this stage has words alone
        instant = "before replay ships"
    *_, rows = die(tmp_path, REPLAY, layout, EVEN, rank, instant, FIRST)
    check(rows, undisturbed.of(layout, EVEN, FIRST), most_again=0)


@pytest.mark.full
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("instant", ["layer", "norm", "replica", "gather"])
def test_pipelines_of_different_lengths_die(tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int) -> None:
    """The one that has most micro-batches, and the other one."""
    *_, rows = die(tmp_path, REPLAY, UNEVEN, CLIPPED, rank, instant)
    check(rows, undisturbed.of(UNEVEN, CLIPPED), most_again=0)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "instant"), list(enumerate(["layer", "reduction", "update", "boundary"])))
def test_pipelines_of_different_lengths_with_copies(
    tmp_path: Path, undisturbed: Undisturbed, instant: str, rank: int
) -> None:
    """One step is lost at most."""
    *_, rows = die(tmp_path, COPIES, UNEVEN, UNCLIPPED, rank, instant)
    check(rows, undisturbed.of(UNEVEN, UNCLIPPED), most_again=1)


@pytest.mark.full
@pytest.mark.parametrize(("number", "instant"), list(enumerate(IN_COPIES)))
def test_one_step_is_lost_at_most(tmp_path: Path, undisturbed: Undisturbed, number: int, instant: str) -> None:
    """With copies after each step."""
    own = UNCLIPPED if number % 2 else CLIPPED
    *_, rows = die(tmp_path, COPIES, TWO_BY_TWO, own, number % 4, instant)
    check(rows, undisturbed.of(TWO_BY_TWO, own), most_again=1)


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
