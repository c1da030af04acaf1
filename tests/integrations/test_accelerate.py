"""Loops of Accelerate's on ranks whose world changes, against stock Accelerate with the same global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pool import RankPool
from tests.integrations import loops

NEAR = 2e-5
Rows = Sequence[Mapping[str, Any]]


def of_rank_0(answers: Sequence[Any]) -> Any:
    """What the process at rank 0 saw."""
    return next(answer for answer in answers if answer["rank"] == 0 and "let go" not in answer)


def furthest(rows: Rows, others: Rows) -> float:
    """By how much of the value two lists of the same rows are apart; every sample is evaluated once."""
    assert [sorted(row) for row in rows] == [sorted(row) for row in others]
    assert all(sorted(row["seen"]) == list(range(loops.EVALUATED)) for row in (*rows, *others) if "seen" in row)
    return max(
        abs(row[name] - same[name]) / max(abs(same[name]), 1e-9)
        for row, same in zip(rows, others, strict=True)
        for name in row
        if name != "seen"
    )


OF_FOUR: dict[str, Any] = {"epochs": 3, "processes": 4}
OF_TWO: dict[str, Any] = {"epochs": 3, "processes": 2, "accumulation": 2, "block": {"layout": {"data": 2}}}
SCHEDULE = {2: {"data": 4, "zero_stage": 3}, 6: {"data": 3, "zero_stage": 2}}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stock Accelerate saves after step 6."""
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def stock(four: RankPool, kept: Path) -> Rows:
    """Of stock Accelerate on four ranks, in micro-batches of 3: an epoch is 4 steps and an evaluation."""
    answers = four.run(loops.run, folder=kept, block=None, save=6, **OF_FOUR, seconds=120)
    rows: Rows = of_rank_0(answers)["rows"]
    assert len(rows) == 15
    return rows


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_on_one_rank_every_bit_is_stock_accelerates(
    alone: RankPool, tmp_path: Path, stage: int, accumulation: int
) -> None:
    job = {"folder": tmp_path, "stage": stage, "accumulation": accumulation, "shuffle": stage == 1}
    theirs, ours = (alone.run(loops.run, block=block, **job)[0] for block in (None, {}))
    assert theirs["rows"] == ours["rows"] and len(ours["rows"]) == 2 * (16 // accumulation + 1)
    assert torch.equal(theirs["words"], ours["words"])


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_in_a_static_world(four: RankPool, stock: Rows, tmp_path: Path, stage: int) -> None:
    """On two ranks, with half of what four accumulate."""
    found = of_rank_0(four.run(loops.run, folder=tmp_path, stage=stage, **OF_TWO, seconds=120))
    assert furthest(found["rows"], stock) < NEAR
    assert (found["ranks"], found["steps per epoch"], found["tally"]) == (2, 4, 24)


def test_a_world_that_changes(four: RankPool, stock: Rows, tmp_path: Path) -> None:
    """2 -> 4 -> 3 ranks and ZeRO 1 -> 3 -> 2, within epochs; what it saves in one world goes on in another one."""
    answers = four.run(loops.run, folder=tmp_path, schedule=SCHEDULE, save=5, **OF_TWO, seconds=120)
    found = of_rank_0(answers)
    assert furthest(found["rows"], stock) < NEAR
    assert (found["ranks"], found["steps per epoch"]) == (3, 4)
    assert [answer.get("let go", False) for answer in answers].count(True) == 1
    job = {**OF_TWO, "block": {"layout": {"data": 3}}, "config": {"train_batch_size": loops.BATCH}}
    again = of_rank_0(four.run(loops.run, folder=tmp_path, load=True, stage=2, **job, seconds=120))
    assert furthest(again["rows"], [row for row in stock if row["step"] > 5]) < NEAR
    assert (found["tally"], again["tally"]) == (3 * 2 + 4 * 1 + 5 * 2, 3 * 2 + 2 * 1 + 7 * 2)


@pytest.mark.full
@pytest.mark.parametrize("data", [2, 3])
def test_a_stock_checkpoint_goes_on_in_another_world(four: RankPool, stock: Rows, kept: Path, data: int) -> None:
    """Of `save_state` of Accelerate's own on four ranks, in the middle of an epoch."""
    job = {**OF_FOUR, "block": {"layout": {"data": data}}, "config": {"train_batch_size": loops.BATCH}}
    answers = four.run(loops.run, folder=kept, load=True, **job, seconds=120)
    assert furthest(of_rank_0(answers)["rows"], [row for row in stock if row["step"] > 6]) < NEAR


@pytest.mark.full
def test_a_loop_without_accumulate(four: RankPool, stock: Rows, tmp_path: Path) -> None:
    """A step is a whole global batch all the same, of two micro-batches after the switch."""
    job = {**OF_FOUR, "block": {}, "accumulates": False, "schedule": {3: {"data": 2}}}
    answers = four.run(loops.run, folder=tmp_path, **job, seconds=120)
    assert furthest(of_rank_0(answers)["rows"], stock) < NEAR


def test_a_stream_in_a_world_that_changes(alone: RankPool, four: RankPool, tmp_path: Path) -> None:
    """As over the data set in its order on one rank; what it saves goes on in another world."""
    job = {"folder": tmp_path, "shuffle": False, "seconds": 120}
    still = of_rank_0(alone.run(loops.run, block={}, batch=12, epochs=3, **job))["rows"]
    job["data"] = loops.trainers.Stream
    found = of_rank_0(four.run(loops.run, schedule=SCHEDULE, save=5, **OF_TWO, **job))
    assert furthest(found["rows"], still) < NEAR
    again = {**OF_TWO, "block": {"layout": {"data": 3}}, "config": {"train_batch_size": loops.BATCH}, "load": True}
    rows = of_rank_0(four.run(loops.run, stage=2, **again, **job))["rows"]
    assert furthest(rows, [row for row in still if row["step"] > 5]) < NEAR


def test_by_configuration(alone: RankPool, tmp_path: Path) -> None:
    """What DeepSpeed's configuration has, names of checkpoints, hooks and trackers are stock Accelerate's."""
    theirs, ours = (
        alone.run(loops.by_configuration, folder=tmp_path / name, block=block)[0]
        for name, block in (("stock", None), ("ours", {}))
    )
    assert theirs == ours
    assert (ours["names"], ours["is what was saved"], ours["steps"]) == (["checkpoint_1", "checkpoint_2"], True, 6)
    assert len(ours["rows"]) == 9


@pytest.mark.full
def test_a_batch_that_does_not_divide(alone: RankPool, four: RankPool, tmp_path: Path) -> None:
    """10 samples on four ranks are 3, 3, 2 and 2."""
    job = {"folder": tmp_path, "samples": 50, "batch": 5}
    theirs = alone.run(loops.run, block=None, accumulation=2, **job)[0]["rows"]
    config = {"train_batch_size": 10}
    ours = four.run(loops.run, block={}, accumulation=1, processes=2, config=config, **job, seconds=120)
    assert furthest(of_rank_0(ours)["rows"], theirs) < NEAR
