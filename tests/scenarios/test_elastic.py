"""Each scenario of the table of elastic launches, in its place in a launch that goes through all rows of its play."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.scenarios.elastic_rows import Play, Row
from tests.scenarios.elastic_stage import Stage
from tests.scenarios.elastic_table import PLAYS


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Play], Stage]]:
    """Return the launch of a play, begun at its first row; the one before is ended then."""
    under_way: list[Stage] = []

    def of(play: Play) -> Stage:
        if not under_way or under_way[0].play is not play:
            while under_way:
                under_way.pop().launch.clean_up()
            under_way.append(Stage(play, tmp_path_factory.mktemp("play") / "job"))
        return under_way[0]

    yield of
    while under_way:
        under_way.pop().launch.clean_up()


@pytest.mark.parametrize(
    ("play", "row"),
    [
        pytest.param(play, row, id=f"{play.name}: {row.name}", marks=[pytest.mark.full] if play.full else [])
        for play in PLAYS
        for row in play.rows
    ],
)
def test_scenario(stage: Callable[[Play], Stage], play: Play, row: Row) -> None:
    """The event has the outcome that the row says, and training is what it is without any."""
    stage(play).perform(row)
