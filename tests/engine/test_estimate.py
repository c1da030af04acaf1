"""What `engine.plan` says a switch costs, beside the event of the switch that follows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from ds_dynatrain.dry_run.answer import DryRunAnswer
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

Planned = list[tuple[SwitchEstimate, SwitchEvent, float]]
"""What was planned, the event, and the link speed after it, for each switch in which a member goes on working."""
SeenByOne = tuple[Planned, dict[str, list[int]], dict[str, Any]]
Seen = list[SeenByOne]


def planned_case() -> SeenByOne:
    """What was planned and what happened, the shapes of the model, and the configuration."""
    config = jobs.config(start=(4, 1))
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

    with jobs.job(config, small_gpt(hidden=40_000), groups=False) as made:
        jobs.train(made, len(SCHEDULE) + 2, each=each)
        return found, made.engine.shapes(), config


@pytest.fixture(scope="module")
def seen(pool: RankPool) -> Seen:
    """What each rank returns."""
    return pool.run(planned_case)


def test_a_plan_says_what_the_switch_says(seen: Seen) -> None:
    assert len(seen[0][0]) == len(SCHEDULE)
    for found, _, _ in seen:
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


def test_the_command_says_what_the_switch_says(seen: Seen, tmp_path: Path) -> None:
    events, shapes, config = seen[0]
    model, settings = tmp_path / "shapes.json", tmp_path / "ds.json"
    model.write_text(json.dumps(shapes))
    settings.write_text(json.dumps(config))
    common = ["plan", "--json", "--model", str(model), "--deepspeed", str(settings), "--gpus-per-node", "4"]
    for planned, event, _ in events[: len(ROUND)]:
        source, target = (
            ",".join(f"{name}={size}" for name, size in side.layout.items()) for side in (event.source, event.target)
        )
        said = CliRunner().invoke(app, [*common, "--from", source, "--to", target])
        figures = DryRunAnswer.model_validate_json(said.stdout).figures
        assert figures is not None
        assert figures.bytes.sent == event.bytes_sent, f"{source} to {target}"
        assert figures.bytes.minimum == event.bytes_bound
        assert figures.bytes.excess["rank 0 keeps its rank"] == event.rank_zero_bytes
        assert figures.memory.peak == event.memory_bound_bytes == planned.peak_memory_bytes
        assert tuple(figures.members) == event.target.members


def test_the_speed_of_one_switch_predicts_the_next(seen: Seen) -> None:
    events = [event for _, event, _ in seen[0][0] if event.bytes_sent]
    ratios = [event.predicted_move_ms / event.move_ms for event in events[1:]]
    assert len(ratios) >= len(SCHEDULE) // 2
    assert 1 / FACTOR < statistics.median(ratios) < FACTOR, ratios
