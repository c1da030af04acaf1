"""Members with two engines die, and no checkpoint is there: both go back to copies of one boundary.

A spare takes the place of who has died. So the losses of both must be those, bit for bit, of runs in which nobody dies,
and where the two stood to each other is what it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import processes
from tests.elastic.deaths import Deaths, Undisturbed
from tests.elastic.runs import SCRIPT, finish, steps_on

SEVERAL = SCRIPT.with_name("several.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def of_two(folder: Path, stages: tuple[int, int], faults: dict[str, str], **given: Any) -> Deaths:
    """A job of three nodes, and a spare, each with two engines in these stages."""
    return Deaths(folder, stages[0], faults, script=SEVERAL, BESIDE=str(stages[1]), **given)


def check(deaths: Deaths, undisturbed: Undisturbed, stages: tuple[int, int], most_again: int = 1) -> None:
    """The history of each engine is that of a run in which nobody dies."""
    steps_on(deaths.job)
    finish(deaths.job)
    for event, stage in zip(("step", "beside"), stages, strict=True):
        deaths.compare(*undisturbed.of(data=deaths.size, zero_stage=stage), most_again, event=event)


QUICK = (((1, 3), "update of the other"),)
INSTANTS = ("boundary", "forward", "update", "after the step", "forward of the other", "update of the other")
TRAVELLING = ("ship", "ship of the other")
ALL = [((1, 3), each) for each in (*INSTANTS, *TRAVELLING)]
ALL += [(stages, each) for stages in ((2, 0), (0, 1)) for each in ("boundary", "after the step", *TRAVELLING)]


@pytest.mark.parametrize(
    ("stages", "instant"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in ALL if each not in QUICK)],
)
def test_both_engines_go_back_to_one_moment(
    tmp_path: Path, undisturbed: Undisturbed, stages: tuple[int, int], instant: str
) -> None:
    """Also the one of which the living have everything: what it holds is of another moment."""
    deaths = of_two(tmp_path, stages, {"b": f"{instant} dies kill"})
    try:
        deaths.tell()
        settled = deaths.job.settled(3, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        assert deaths.log("a").count("from copies that members keep of each other") == 2
        check(deaths, undisturbed, stages, most_again=2 if instant in TRAVELLING else 1)
    finally:
        deaths.job.clean_up()
