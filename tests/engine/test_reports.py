"""Monitors, timers, profilers and the communication log go on over switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest

from tests.engine import jobs
from tests.engine.pool import RankPool

SCHEDULE: jobs.Schedule = {2: (4, 3), 4: (3, 1), 5: (2, 3), 6: (4, 0), 7: (2, 2)}
STEPS = 9


def reports_case(folder: str, profile_step: int) -> jobs.Record:
    """Everything that reports is on: what each of them has after the last step."""
    settings = jobs.config(
        start=(2, 1),
        train_micro_batch_size_per_gpu=3,
        steps_per_print=1,
        wall_clock_breakdown=True,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"},
        flops_profiler={"enabled": True, "profile_step": profile_step, "output_file": f"{folder}/flops"},
        comms_logger={"enabled": True, "verbose": False, "prof_all": True},
    )
    record = jobs.Record()
    try:
        with jobs.job(settings) as made:

            def each(made: jobs.Job) -> None:
                record.notes.setdefault("timers", {})[made.engine.global_steps] = dict(
                    made.engine.get_wall_clock_timers()
                )
                assert made.engine.tput_timer.batch_size == 12
                if made.engine.global_steps == STEPS:
                    record.notes["summary"] = deepspeed.comm.log_summary(return_dict=True)

            jobs.train(made, STEPS, SCHEDULE, record, each)
            record.notes["throughput"] = made.engine.tput_timer.avg_samples_per_sec()
    finally:
        deepspeed.comm.configure(enabled=False)
    return record


@pytest.mark.parametrize("profile_step", [3, pytest.param(4, marks=pytest.mark.full)])
def test_reports_go_on(pool: RankPool, tmp_path: Path, profile_step: int) -> None:
    """The profiled step is at stage 3 in a world of four, or at stage 1 in one of three."""
    plain = pool.run(plain_case)
    found = pool.run(reports_case, folder=str(tmp_path), profile_step=profile_step)
    assert [record.losses for record in found] == [record.losses for record in plain]
    rates = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rates[0].split(",")[0] == "step"
    assert [int(line.split(",")[0]) for line in rates[1:]] == [12 * step for step in range(1, STEPS + 1)]
    assert len((tmp_path / "job" / "Train_Samples_elapsed_time_ms_step.csv").read_text().splitlines()) == STEPS + 1
    profile = (tmp_path / "flops").read_text()
    print(profile[:1500])
    assert "Flops Profiler" in profile and f"{dict(SCHEDULE)[2 if profile_step == 3 else 4][0]}" in profile
    record: Any = found[0]
    assert sorted(record.notes["timers"]) == list(range(1, STEPS + 1))
    assert record.notes["summary"]


def plain_case() -> jobs.Record:
    """The same without reports."""
    return jobs.run(jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=3), STEPS, SCHEDULE)
