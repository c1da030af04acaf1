"""Plays every row of a fixed launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios import axes, capabilities, checkpoints, refusals, switches
from tests.scenarios.launch import WarmRanks
from tests.scenarios.row import Row
from tests.scenarios.runner import Runner

ROWS = (*switches.ROWS, *axes.ROWS, *checkpoints.ROWS, *capabilities.ROWS, *refusals.ROWS)
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Four ranks for all rows."""
    folder = tmp_path_factory.mktemp("scenarios")
    ranks = WarmRanks(folder)
    yield Runner(ranks, folder)
    ranks.stop()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=[FULL] if row.full else []) for row in ROWS])
def test_row(runner: Runner, row: Row) -> None:
    runner.check(row)
