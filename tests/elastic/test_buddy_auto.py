"""Mode "auto" in a job of its own: it changes no loss, and protects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.agents import processes
from tests.elastic.deaths import Deaths, Undisturbed, protected

AUTO = {"buddies": {"mode": "auto", "verify_every_steps": 4}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


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
    finally:
        deaths.job.clean_up()
