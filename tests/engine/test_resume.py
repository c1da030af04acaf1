"""A job that starts from a folder of checkpoints, whatever wrote the latest one; and one that finds none there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.errors import CheckpointError
from tests.engine import jobs, oracle
from tests.engine.pool import RankPool

Seen = tuple[int, oracle.State, dict[int, list[tuple[float, int]]]]


def running_case(folder: Path, sizes: jobs.Sizes, steps: int, save: str) -> Seen | None:
    """A job with one configuration for every start; it saves at its end. (steps it began with, state then, losses)"""
    settings = jobs.config("bf16", sizes)
    settings["dynatrain"]["resume"] = {"path": str(folder)}
    with jobs.job(settings) as made:
        engine = made.engine
        if engine.idle:
            return None
        begun, state = int(engine.global_steps), oracle.gather(engine)
        assert (engine.resumed is None) == (begun == 0)
        record = jobs.train(made, steps)
        if save == "ours":
            engine.save(folder)
        elif save:
            engine.save_checkpoint(str(folder))
        return begun, state, record.losses
    return None


def test_whichever_format_is_the_latest(pool: RankPool, tmp_path: Path) -> None:
    """Three starts in three layouts: from nothing, from ours, from DeepSpeed's."""
    plan = [((2, 1), 2, "ours"), ((3, 3), 3, "DeepSpeed's"), ((2, 2), 4, "ours")]
    begun = 0
    for sizes, steps, save in plan:
        found = pool.run(running_case, folder=tmp_path, sizes=sizes, steps=steps, save=save)
        assert [each[0] for each in found if each is not None] == [begun] * sizes[0]
        assert sorted(found[0][2]) == list(range(begun, steps))
        begun = steps
    assert (tmp_path / "latest").read_text() == "step4"


def spoilt_case(folder: Path) -> str:
    """What a job says whose latest checkpoint is not there."""
    settings = jobs.config("bf16", (4, 1))
    settings["dynatrain"]["resume"] = {"path": str(folder)}
    try:
        with jobs.job(settings):
            return "began"
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("named", ["gone", "latest"])
def test_never_from_nothing_by_mistake(pool: RankPool, tmp_path: Path, named: str) -> None:
    (tmp_path / "latest").write_text(named)
    said: list[Any] = pool.run(spoilt_case, folder=tmp_path)
    assert len(set(said)) == 1 and named in said[0], said
