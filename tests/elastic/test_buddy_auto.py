"""Mode "auto" in jobs of their own: what it takes is said, is the same on all members, and changes no loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.elastic.agents import processes
from tests.elastic.deaths import NODES, Deaths, Undisturbed, protected
from tests.elastic.runs import finish

AUTO = {"buddies": {"mode": "auto", "verify_every_steps": 4}}
WEIGHED = re.compile(r"a step waits \S+ ms where it is replayed, and \S+ ms for a copy: (.*)")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_where_steps_are_short_it_tries_replay(tmp_path: Path, undisturbed: Undisturbed, stage: int) -> None:
    """A copy takes more than its share of them: one member says, once, what costs how much, and what is done."""
    deaths = Deaths(tmp_path, stage, {}, spares=0, block=AUTO, STEP_SECONDS="0.01")
    try:
        finish(deaths.job)
        deaths.compare(*undisturbed.of(data=3, zero_stage=stage), most_again=0)
        said = WEIGHED.findall(deaths.log(*NODES))
        assert len(said) == 1, deaths.job.logs()
        assert re.fullmatch(r"steps are replayed|a copy is taken after every \d+ steps", said[0])
    finally:
        deaths.job.clean_up()


@pytest.mark.full
def test_where_steps_are_long_it_takes_copies(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """At each step, and a death costs one at most."""
    deaths = Deaths(tmp_path, 2, {"b": "update dies kill"}, block=AUTO, STEP_SECONDS="0.6")
    try:
        deaths.job.wait(lambda: protected(deaths.job.status()), "whole copies")
        deaths.tell()
        settled = deaths.job.settled(3, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        deaths.check(undisturbed)
        assert not WEIGHED.findall(deaths.log(*NODES, *deaths.spares))
    finally:
        deaths.job.clean_up()
