"""A checkpoint is loaded, and members die: no copy from before the load may come back, whoever has it."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from tests.elastic.agents import Row
from tests.elastic.deaths import Deaths
from tests.elastic.runs import SCRIPT, finish, node_of, steps_on
from tests.elastic.test_buddy_idle import Idle

LOADING = SCRIPT.with_name("loading.py")


def loaded(idle: Idle | Deaths) -> Row:
    """What the first of those that have loaded says of it."""
    rows: list[Row] = idle.job.wait(lambda: idle.job.rows("loaded"), "the load")
    return rows[0]


def save_and_wait(idle: Idle | Deaths) -> None:
    """A checkpoint is there, and a few steps were made since."""
    idle.tell("saves")
    idle.job.wait(lambda: idle.job.rows("saved"), "the checkpoint")
    steps_on(idle.job, 4)


def test_a_member_that_has_worked_brings_nothing_back(tmp_path: Path) -> None:
    """It is idle, all that lives, and has whole copies of what the load has replaced: the job ends rather."""
    layouts = {"1": {"data": 1}, "2": {"data": 2}}
    idle = Idle(tmp_path, 1, layouts, "ab", script=LOADING)
    try:
        idle.wait_for_keepers(0, 1)
        save_and_wait(idle)
        (idle.job.folder / "loads").write_text("1 1 load dies")
        idle.tell("switches", more=json.dumps({"data": 1}))
        row = loaded(idle)
        assert row["step"] < row["before"]
        left = [node for node in idle.nodes if row["pid"] != idle.pids[node]]
        assert [idle.job.code(node) != 0 for node in left] == [True]
        said = idle.log(*left)
        assert "from copies that members keep" not in said
        assert "were taken before a checkpoint was loaded" in said, said[-3000:]
    finally:
        idle.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("call", ["load", "load_checkpoint"])
def test_what_follows_the_load_is_the_newer_one(tmp_path: Path, call: str) -> None:
    """Also where it has fewer steps than what was there before."""
    deaths = Deaths(tmp_path, 1, {}, script=LOADING)
    try:
        save_and_wait(deaths)
        (deaths.job.folder / "loads").write_text(f"1 3 {call}")
        row = loaded(deaths)
        assert row["step"] < row["before"]
        deaths.job.wait(lambda: after(deaths, row), "steps after the load")
        dying, lived = node_of(deaths.job, deaths.first, 1), node_of(deaths.job, deaths.first, 0)
        pids = deaths.job.workers_of(dying)
        deaths.job.kill(dying, signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deaths.job.settled(3, deaths.first.generation)
        steps_on(deaths.job)
        finish(deaths.job)
        assert "from copies that members keep" in deaths.log(lived)
        steps = [each["step"] for each in after(deaths, row)]
        assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(steps)), steps
    finally:
        deaths.job.clean_up()


def after(deaths: Deaths, row: Row) -> list[Row]:
    """Steps of that process since it has loaded, if it has made two."""
    rows = [each for each in deaths.job.rows("step") if each["pid"] == row["pid"] and each["time"] > row["time"]]
    return rows if len(rows) > 1 else []
