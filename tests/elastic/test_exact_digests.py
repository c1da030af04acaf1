"""Report files of exact jobs in which somebody dies, held against those of one node on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.exact.bits.bit_records import ExactRun, read_exact
from ds_dynatrain.exact.bits.difference import compare
from tests.elastic.deaths import Deaths, protected
from tests.elastic.exact_jobs import MACHINE, OWN, SCRIPT, exact_job
from tests.elastic.runs import finish, steps_on
from tests.elastic.test_exact import COPY

pytestmark = pytest.mark.full


def block_of(file: Path) -> dict[str, Any]:
    return {"exact": True, "report": {"jsonl": str(file)}}


def undisturbed(folder: Path, stage: int, last: int) -> ExactRun:
    """One node, with at least so many steps."""
    folder.mkdir()
    job = exact_job(folder, stage, nodes="1:1", block=block_of(folder / "lines"), variables={"STEP_SECONDS": "0"})
    try:
        job.coordinator("coordinator")
        job.node("a", is_host=0)
        job.wait(lambda: max((row["step"] for row in job.rows("step")), default=0) > last, "as many steps")
        finish(job)
    finally:
        job.clean_up()
    return read_exact(folder / "lines")


@pytest.mark.parametrize(("stage", "instant"), [(2, "update"), (1, "gather"), (3, "sum")])
def test_one_of_three_dies(tmp_path: Path, stage: int, instant: str) -> None:
    """Steps that are made again count once; of one that was made without the dead rank its losses may be unknown."""
    folder, file = tmp_path / "job", tmp_path / "lines"
    folder.mkdir()
    given = {"block": {**block_of(file), **COPY}, "own": OWN, "script": SCRIPT, "spares": 0, "least": 1}
    deaths = Deaths(folder, stage, {"b": f"{instant} dies kill"}, **given, **MACHINE)
    try:
        deaths.job.wait(lambda: protected(deaths.job.status()), "whole copies")
        deaths.tell()
        deaths.job.settled(2, deaths.first.generation)
        steps_on(deaths.job)
        finish(deaths.job)
    finally:
        deaths.job.clean_up()
    found = read_exact(file)
    compared = compare(found, undisturbed(tmp_path / "alone", stage, max(found.steps)))
    assert compared.is_identical, compared
    assert len(compared.steps) == len(found.steps) == len(compared.states)
    assert compared.steps[-1] - len(compared.steps) <= 1 and compared.unknown <= 3
