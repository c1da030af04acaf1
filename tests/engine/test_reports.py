"""Monitors, timers, profilers and the communication log go on over switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest

from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.engine import jobs, pipeline_walks
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


@pytest.mark.full
@pytest.mark.parametrize("profile_step", [3, 4])
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


def timed_stages() -> tuple[list[float], str]:
    """Losses of a pipeline of one stage with DeepSpeed's timers, and why there can be no second one."""
    with pipeline_walks.job(
        pipeline_walks.settings(Layout(zero_stage=1, data=2), wall_clock_breakdown=True), "tied"
    ) as made:
        losses = [made.engine.train_batch().item() for _ in range(2)]
        with pytest.raises(SwitchRefused) as caught:
            made.engine.switch(pipe=2, data=1)
        return losses, str(caught.value)


def started_in_stages() -> str:
    """What `initialize` says of two stages."""
    settings = pipeline_walks.settings(Layout(zero_stage=1, pipe=2), wall_clock_breakdown=True)
    with pytest.raises(ConfigError) as caught, pipeline_walks.job(settings, "tied"):
        pass
    return str(caught.value)


def test_timers_of_stages_are_refused_by_name(pool: RankPool) -> None:
    """Plain DeepSpeed 0.19.8 starts a timer twice on every stage but the last: an AssertionError in the first step."""
    for losses, said in pool.run(timed_stages)[:2]:
        assert len(losses) == 2 and "wall_clock_breakdown: with more than one stage DeepSpeed 0.19.8" in said
    for said in pool.run(started_in_stages):
        assert "wall_clock_breakdown: with more than one stage DeepSpeed 0.19.8" in said and "pipe=1" in said


def plain_case() -> jobs.Record:
    """The same without reports."""
    return jobs.run(jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=3), STEPS, SCHEDULE)
