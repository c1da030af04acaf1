"""What `engine.plan` says a switch costs, beside the event of the switch that follows."""

from __future__ import annotations

import statistics

import pytest

from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.reshard.pending import PendingSwitch, SwitchEstimate
from tests.engine import jobs
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

ROUND = [(4, 3), (3, 1), (4, 2), (2, 3), (4, 1)]
SCHEDULE: jobs.Schedule = {step: ROUND[(step - 1) % len(ROUND)] for step in range(1, 11)}
FACTOR = 5.0
"""Most between the predicted and the measured milliseconds of a move, in the median of the switches of a schedule.

A move takes some milliseconds here. One that another process on the machine holds up is slow by itself and makes the
next prediction too slow, so no single switch is judged.
"""


def planned_case() -> list[tuple[SwitchEstimate, SwitchEvent, float]]:
    """(what was planned, the event, the link speed after it) for each switch in which this member goes on working."""
    asked, found = list[tuple[SwitchEstimate, PendingSwitch]](), list[tuple[SwitchEstimate, SwitchEvent, float]]()

    def each(made: jobs.Job) -> None:
        engine = made.engine
        if asked and asked[0][1].event is engine.last_switch:  # a member that was idle since comes to a later one
            found.append((asked[0][0], engine.last_switch, engine.plan(data=2).bytes_per_second))
        asked.clear()
        if engine.global_steps in SCHEDULE:
            data, stage = SCHEDULE[engine.global_steps]
            planned = engine.plan(data=data, zero_stage=stage)
            asked.append((planned, engine.switch(data=data, zero_stage=stage, at=engine.global_steps)))

    with jobs.job(jobs.config(start=(4, 1)), small_gpt(hidden=40_000)) as made:
        jobs.train(made, len(SCHEDULE) + 2, each=each)
    return found


def test_a_plan_says_what_the_switch_says(pool: RankPool) -> None:
    seen = pool.run(planned_case)
    assert len(seen[0]) == len(SCHEDULE)
    for found in seen:
        for planned, event, speed in found:
            assert event.outcome == "committed" and not planned.refusal
            assert planned.bytes_sent == event.bytes_minimum == event.bytes_sent
            assert planned.bytes_bound == event.bytes_bound == event.bytes_minimum
            assert planned.rank_zero_bytes == event.rank_zero_bytes == 0
            assert planned.peak_memory_bytes == event.memory_bound_bytes
            assert planned.members == event.target.members
            assert 1e3 * planned.seconds == pytest.approx(event.predicted_move_ms)
            if event.bytes_sent:
                assert speed == pytest.approx(1e3 * event.bytes_busiest / event.move_ms)
            assert event.move_ms >= event.phases_ms["move"]


def test_the_speed_of_one_switch_predicts_the_next(pool: RankPool) -> None:
    events = [event for _, event, _ in pool.run(planned_case)[0] if event.bytes_sent]
    ratios = [event.predicted_move_ms / event.move_ms for event in events[1:]]
    assert len(ratios) >= len(SCHEDULE) // 2
    assert 1 / FACTOR < statistics.median(ratios) < FACTOR, ratios
