"""Mode "auto" in jobs of their own: it changes no loss, protects, and is the same on all members."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.agents import processes
from tests.elastic.deaths import Deaths, Undisturbed, protected
from tests.elastic.runs import SCRIPT, finish, steps_on

AUTO = {"buddies": {"mode": "auto", "verify_every_steps": 4}}


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


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_where_steps_are_short_all_take_the_same(tmp_path: Path, undisturbed: Undisturbed, stage: int) -> None:
    """Copies, fewer copies or replayed steps, as it is on this machine: at each step all members say the same."""
    script = SCRIPT.with_name("keeping.py")
    deaths = Deaths(tmp_path, stage, {}, spares=0, block=AUTO, script=script, STEP_SECONDS="0")
    try:
        steps_on(deaths.job, 60)
        finish(deaths.job)
        deaths.compare(*undisturbed.of(data=3, zero_stage=stage), most_again=0)
        taken: dict[int, list[tuple[str, int]]] = {}
        for row in deaths.job.rows("protection"):
            taken.setdefault(row["step"], []).append((row["of"]["mode"], row["of"]["every_steps"]))
        assert len(taken) > 60 and all(len(set(said)) == 1 for said in taken.values()), taken
    finally:
        deaths.job.clean_up()
