"""A stage of a pipeline dies while layers are timed in every step: training goes on as without that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.agents import Row
from tests.elastic.deaths import Deaths
from tests.elastic.runs import finish_together, node_of, steps_on
from tests.elastic.test_buddy_pipelines import CLIPPED, COPIES, NODES, TWO_BY_TWO, UNCLIPPED, Undisturbed, check

BALANCE = {"mode": "act", "every_steps": 1, "window_steps": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("instant", ["layer", "boundary", "update", "loss"])
def test_a_death_in_a_window(tmp_path: Path, undisturbed: Undisturbed, instant: str) -> None:
    faults = {node: f"{instant} dies-{node} kill" for node in NODES}
    block = {"layout": dict(TWO_BY_TWO), "buddies": COPIES, "balance": BALANCE}
    deaths = Deaths(tmp_path, 1, faults, NODES, block=block, own=CLIPPED, KIND="pipeline")
    try:
        deaths.tell(f"dies-{node_of(deaths.job, deaths.first, 2)}")
        deaths.job.settled(4, deaths.first.generation)
        steps_on(deaths.job)
        finish_together(deaths.job)
        check(deaths.job.rows("step"), undisturbed.of(TWO_BY_TWO, CLIPPED), 2)
    finally:
        deaths.job.clean_up()


UNEVEN = {**TWO_BY_TWO, "boundaries": [0, 1, 7]}
MANY = {**UNCLIPPED, "train_micro_batch_size_per_gpu": 1}
"""Micro-batches: with one alone boundaries make no difference."""
ACTING = {"mode": "act", "every_steps": 2, "safety": 0.0, "least_gain": 0.0, "slow_ratio": None}


@pytest.mark.full
@pytest.mark.parametrize(
    ("instant", "act"), [("prepare", "kill"), ("move", "kill"), ("commit", "kill"), ("prepare", "term")]
)
def test_a_member_goes_while_layers_are_moved(tmp_path: Path, undisturbed: Undisturbed, instant: str, act: str) -> None:
    """The move comes to nothing or is made; in the next world layers are moved again, if they were not."""
    (tmp_path / "goes").write_text("0")
    block = {"layout": UNEVEN, "buddies": COPIES, "balance": ACTING}
    faults = {"b": f"{instant} goes {act}"}
    deaths = Deaths(tmp_path, 1, faults, NODES, block=block, own=MANY, KIND="pipeline")
    job = deaths.job
    try:
        job.code("b")
        job.settled(4, deaths.first.generation)
        job.wait(lambda: [row for row in job.rows("switch") if _cut(row) != (0, 1, 7)] or None, "a move")
        steps_on(job)
        finish_together(job)
        check(job.rows("step"), undisturbed.of(TWO_BY_TWO, MANY), 2)
    finally:
        job.clean_up()


def _cut(row: Row) -> tuple[int, ...]:
    return tuple(row["layout"]["boundaries"] or ())
