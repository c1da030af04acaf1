"""Plays every row of a fixed launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios import switches
from tests.scenarios.launch import WarmRanks
from tests.scenarios.row import Row
from tests.scenarios.runner import Runner

ROWS = (*switches.ROWS,)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Four ranks for all rows."""
    folder = tmp_path_factory.mktemp("scenarios")
    ranks = WarmRanks(folder)
    yield Runner(ranks, folder)
    ranks.stop()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(runner: Runner, row: Row) -> None:
    runner.check(row)
