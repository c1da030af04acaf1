"""Trainers of Lightning's on ranks whose world changes, against Lightning's own DeepSpeed strategy."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.engine.pool import RankPool
from tests.integrations import lit

NEAR = 2e-5
Rows = Sequence[Mapping[str, Any]]

JOB: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 2, "gradient_clip_val": 0.5}
OF_TWO: dict[str, Any] = {**JOB, "accumulate_grad_batches": 2, "block": {"layout": {"data": 2}}}
"""A global batch of 12, as that of four ranks without accumulation."""
SCHEDULE = {2: {"data": 4, "zero_stage": 3}, 8: {"data": 3, "zero_stage": 2}}


def of_rank_0(answers: Sequence[Any]) -> Any:
    """What the process at rank 0 saw."""
    return next(answer for answer in answers if answer["rank"] == 0 and "let go" not in answer)


def furthest(rows: Rows, others: Rows) -> float:
    """By how much of the value two lists of the same rows are apart."""
    assert [sorted(row) for row in rows] == [sorted(row) for row in others]
    assert [(row["step"], row.get("epoch")) for row in rows] == [(row["step"], row.get("epoch")) for row in others]
    return max(
        abs(row[name] - same[name]) / max(abs(same[name]), 1e-9)
        for row, same in zip(rows, others, strict=True)
        for name in row
    )


def without_means(rows: Rows, after: int = 0) -> Rows:
    """Steps and evaluations; a process that leaves in the middle of an epoch takes its part of the mean along."""
    return [row for row in rows if "mean" not in row and row["step"] > after]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Lightning's own strategy saves after each second step."""
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def stock(four: RankPool, kept: Path) -> dict[str, Any]:
    """Of Lightning's own strategy on four ranks, in micro-batches of 3: an epoch is 6 steps."""
    found: dict[str, Any] = of_rank_0(four.run(lit.run, folder=kept, block=None, save=2, **JOB, seconds=120))
    assert len(found["rows"]) == 12 + 6 + 2
    return found


@pytest.mark.full
def test_in_a_static_world_every_bit_is_lightnings(four: RankPool, stock: dict[str, Any], tmp_path: Path) -> None:
    found = of_rank_0(four.run(lit.run, folder=tmp_path, block={}, save=4, **JOB, seconds=120))
    assert found["rows"] == stock["rows"]
    assert torch.equal(found["weights"], stock["weights"])
    assert found["hooks"] == stock["hooks"]
    assert (found["ranks"], found["batches"], found["steps"]) == (4, 6, 12)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "last.ckpt",
        "step=12.ckpt",
        "step=4.ckpt",
        "step=8.ckpt",
    ]


def test_a_world_that_changes(four: RankPool, stock: dict[str, Any], tmp_path: Path) -> None:
    """2 -> 4 -> 3 ranks and ZeRO 1 -> 3 -> 2, within epochs; what it saves in one world goes on in another one."""
    logs = CSVLogger(tmp_path / "logs", version="")
    answers = four.run(
        lit.run, folder=tmp_path, schedule=SCHEDULE, save=4, tests=True, logger=logs, **OF_TWO, seconds=120
    )
    found = of_rank_0(answers)
    with next((tmp_path / "logs").rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("dynatrain/world_size")]
    switches = [
        (int(row["step"]), float(row["dynatrain/world_size"]), float(row["dynatrain/committed"])) for row in rows
    ]
    assert switches == [(step, sizes["data"], 1.0) for step, sizes in SCHEDULE.items()]
    assert all(float(row["dynatrain/pause_ms"]) > 0 for row in rows)
    assert furthest(without_means(found["rows"]), without_means(stock["rows"])) < NEAR
    assert torch.allclose(found["weights"], stock["weights"], rtol=NEAR, atol=1e-6)
    assert (found["ranks"], found["batches"], found["steps"]) == (3, 6, 12)
    evaluated = {row["step"]: row["val"] for row in stock["rows"] if "val" in row}
    assert found["test"] == pytest.approx(evaluated[12], rel=NEAR)
    assert found["test of first"] == pytest.approx(evaluated[4], rel=NEAR)
    assert [answer.get("let go", False) for answer in answers].count(True) == 1
    job = {**OF_TWO, "block": {"layout": {"data": 3}}, "config": {"train_batch_size": 12}}
    again = of_rank_0(four.run(lit.run, folder=tmp_path, resume="step=4.ckpt", stage=2, **job, seconds=120))
    assert furthest(without_means(again["rows"]), without_means(stock["rows"], after=4)) < NEAR


@pytest.mark.parametrize("data", [3, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("step", [4, pytest.param(6, marks=pytest.mark.full)])
def test_a_checkpoint_of_lightnings_goes_on_in_another_world(
    four: RankPool, stock: dict[str, Any], kept: Path, data: int, step: int
) -> None:
    """Saved on four ranks, in the middle of an epoch or at its end."""
    job = {**JOB, "block": {"layout": {"data": data}}, "config": {"train_batch_size": 12}}
    answers = four.run(lit.run, folder=kept, resume=f"step={step}.ckpt", stage=2, **job, seconds=120)
    assert furthest(without_means(of_rank_0(answers)["rows"]), without_means(stock["rows"], after=step)) < NEAR


@pytest.mark.parametrize("interval", [2, pytest.param(1.0, marks=pytest.mark.full)])
def test_a_stream_in_a_world_that_changes(four: RankPool, tmp_path: Path, interval: float) -> None:
    """Three passes of six steps, with evaluations in them or at their ends, as over the data set."""
    job: dict[str, Any] = {"max_epochs": 3, "max_steps": 18, "module": {"schedule": "epoch"}}
    job |= {"folder": tmp_path, "val_check_interval": interval, "seconds": 120}
    still = of_rank_0(four.run(lit.run, block={}, **job))
    block, schedule = OF_TWO["block"], {2: {"data": 4, "zero_stage": 3}, 8: {"data": 3, "zero_stage": 2}}
    job |= {"data": lit.Stream, "workers": 1, "accumulate_grad_batches": 2}
    found = of_rank_0(four.run(lit.run, block=block, schedule=schedule, **job))
    assert furthest(without_means(found["rows"]), without_means(still["rows"])) < NEAR
    assert found["steps"] == still["steps"] == 18
