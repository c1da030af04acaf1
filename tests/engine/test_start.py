"""A job that never switches, and one that does once: the harness with a real engine."""

from __future__ import annotations

import pytest

from tests.engine import jobs
from tests.engine.pool import RankPool


def training(dtype: str, start: jobs.Sizes, steps: int, schedule: jobs.Schedule) -> jobs.Record:
    return jobs.run(jobs.config(dtype, start), steps, schedule)


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.full) for each in (0, 1, 2)), 3])
def test_a_part_of_the_processes_trains(pool: RankPool, stage: int) -> None:
    records = pool.run(training, dtype="fp32", start=(2, stage), steps=10, schedule={})
    losses = jobs.global_losses(records)
    assert (
        [bool(record.losses) for record in records] == [True, True, False, False]
        and len(losses) == 10
        and losses[-1] < losses[0]
    )


def test_members_wake_and_go_idle(pool: RankPool) -> None:
    records = pool.run(training, dtype="fp32", start=(2, 1), steps=12, schedule={4: (4, 3), 8: (1, 0)})
    assert len(jobs.global_losses(records)) == 12
    assert [sorted(record.losses) for record in records[2:]] == [[4, 5, 6, 7]] * 2
    assert [record.notes for record in records] == [{"last": True}, {}, {}, {}], "the others were let go while idle"
