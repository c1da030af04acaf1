"""What working members do together finds together, whatever one of them knows already that others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.errors import CheckpointError, SwitchRefused
from tests.engine import jobs
from tests.engine.pool import RankPool


def ahead_case(folder: str) -> tuple[str, ...]:
    """One member has seen the proposal of a change at this boundary, and the other one will at the next."""
    saved = []

    def each(job: jobs.Job) -> None:
        if job.engine.global_steps in (1, 2):
            job.engine._parts.attempt += job.engine.rank
            saved.append(job.engine.save(folder).name)
            job.engine._parts.attempt -= job.engine.rank

    with jobs.job(jobs.config("fp32", (2, 1))) as made:
        jobs.train(made, 3, {}, jobs.Record(), each=each)
    return tuple(saved)


def discarded_case(folder: str) -> tuple[float, list[str]]:
    """One member is in a global batch that is discarded: it asks nobody for anything."""
    said = []
    with jobs.job(jobs.config("fp32", (2, 1))) as made:
        engine: Any = made.engine
        jobs.train(made, 1, {}, jobs.Record())
        if engine.rank != 1:
            return 0.0, []
        engine._parts.is_discarded = True
        mean = float(engine.mean(3.0, 2))
        asked = (
            (engine.switch, {"data": 1}),
            (engine.update_param_groups, {}),
            (engine.save, {"path": folder}),
        )
        for ask, arguments in (*asked, (engine.load, {"path": folder})):
            with pytest.raises((SwitchRefused, CheckpointError)) as refusal:
                ask(**arguments)
            said.append(str(refusal.value))
        engine._parts.is_discarded = False
        return mean, said
    return 0.0, []


def test_a_checkpoint_while_a_change_is_being_prepared(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(ahead_case, folder=str(tmp_path))
    assert saved[0] == saved[1] == ("step1", "step2")


def test_a_discarded_batch_has_no_collective(pool: RankPool, tmp_path: Path) -> None:
    mean, said = pool.run(discarded_case, folder=str(tmp_path))[1]
    assert mean == 3.0
    assert len(said) == 4 and all("formed anew in this global batch" in words for words in said), said
