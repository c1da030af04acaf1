"""A stage of a pipeline dies while layers are timed in every step: training goes on as without that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.deaths import Deaths
from tests.elastic.runs import finish_together, node_of, steps_on
from tests.elastic.test_buddy_pipelines import CLIPPED, COPIES, NODES, REPLAY, TWO_BY_TWO, Undisturbed, check

BALANCE = {"every_steps": 1, "window_steps": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("buddies", "instant"),
    [
        (COPIES, "layer"),
        pytest.param(COPIES, "boundary", marks=pytest.mark.full),
        pytest.param(REPLAY, "replica", marks=pytest.mark.full),
        pytest.param(COPIES, "loss", marks=pytest.mark.full),
    ],
)
def test_a_death_in_a_window(
    tmp_path: Path, undisturbed: Undisturbed, buddies: dict[str, object], instant: str
) -> None:
    faults = {node: f"{instant} dies-{node} kill" for node in NODES}
    block = {"layout": dict(TWO_BY_TWO), "buddies": buddies, "balance": BALANCE}
    deaths = Deaths(tmp_path, 1, faults, NODES, block=block, own=CLIPPED, KIND="pipeline")
    try:
        deaths.tell(f"dies-{node_of(deaths.job, deaths.first, 2)}")
        deaths.job.settled(4, deaths.first.generation)
        steps_on(deaths.job)
        finish_together(deaths.job)
        check(deaths.job.rows("step"), undisturbed.of(TWO_BY_TWO, CLIPPED), 2)
    finally:
        deaths.job.clean_up()
