"""Schedules, precision, uneven batches and ends of Lightning's Trainer on ranks whose world changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.engine.pool import RankPool
from tests.integrations import lit
from tests.integrations.test_lightning import JOB, NEAR, OF_TWO, SCHEDULE, furthest, of_rank_0, without_means
from tests.integrations.test_run import launched

pytestmark = pytest.mark.full

OF_DEEPSPEED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_on_one_rank_every_bit_is_lightnings(alone: RankPool, tmp_path: Path, stage: int) -> None:
    job = {"folder": tmp_path, "stage": stage, "module": {"dropout": 0.1}, **JOB}
    theirs, ours = (alone.run(lit.run, block=block, **job)[0] for block in (None, {}))
    assert theirs["rows"] == ours["rows"] and torch.equal(theirs["weights"], ours["weights"])


@pytest.mark.parametrize(
    ("module", "config"),
    [({"schedule": "plateau"}, {}), ({"schedule": "epoch"}, {}), ({"schedule": "none"}, OF_DEEPSPEED)],
    ids=["plateau", "epoch", "of DeepSpeed"],
)
def test_schedules(four: RankPool, tmp_path: Path, module: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    job = {"folder": tmp_path, "module": module, "config": config, "seconds": 120}
    theirs = of_rank_0(four.run(lit.run, block=None, **JOB, **job))
    ours = of_rank_0(four.run(lit.run, schedule=SCHEDULE, **OF_TWO, **job))
    assert len({row["rate"] for row in theirs["rows"] if "rate" in row}) > 1
    assert furthest(without_means(ours["rows"]), without_means(theirs["rows"])) < NEAR


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(four: RankPool, tmp_path: Path, precision: str) -> None:
    job = {"folder": tmp_path, "precision": precision, "seconds": 120}
    theirs, ours = (of_rank_0(four.run(lit.run, block=block, **JOB, **job)) for block in (None, {}))
    assert theirs["rows"] == ours["rows"] and torch.equal(theirs["weights"], ours["weights"])


def test_a_checkpoint_of_lightnings_that_accumulated(four: RankPool, tmp_path: Path) -> None:
    """It counts two batches in a step, and divides gradients twice, of which clipping leaves nothing."""
    job = {"folder": tmp_path, "gradient_clip_val": 0.5, "max_epochs": 2, "seconds": 120}
    theirs = of_rank_0(
        four.run(lit.run, block=None, save=2, accumulate_grad_batches=2, val_check_interval=4, samples=144, **job)
    )
    block, config = {"layout": {"data": 3}}, {"train_batch_size": 24}
    ours = of_rank_0(
        four.run(lit.run, block=block, config=config, resume="step=4.ckpt", val_check_interval=2, samples=144, **job)
    )
    rows = [
        [{**row, "norm": 1.0} if "norm" in row else row for row in without_means(each["rows"], 4)]
        for each in (ours, theirs)
    ]
    assert furthest(*rows) < NEAR


def test_a_batch_that_does_not_divide(alone: RankPool, four: RankPool, tmp_path: Path) -> None:
    """The last global batch of an epoch has two samples: two of four ranks have none, and count none."""
    job = {"folder": tmp_path, "samples": 50, "config": {"train_batch_size": 12}, "block": {}, "max_epochs": 2}
    theirs = alone.run(lit.run, batch=12, **job)[0]
    ours = of_rank_0(four.run(lit.run, workers=1, **job, seconds=120))
    assert furthest(without_means(ours["rows"]), without_means(theirs["rows"])) < NEAR
    assert [row["count"] for row in ours["rows"] if "count" in row] == [50.0, 50.0]


def test_a_process_that_comes_twice(four: RankPool, tmp_path: Path) -> None:
    """It works, is idle over the end of an epoch, and works again."""
    schedule = {3: {"data": 2}, 8: {"data": 4, "zero_stage": 2}}
    job = {"folder": tmp_path, "seconds": 120, "block": {}, **JOB}
    still = of_rank_0(four.run(lit.run, **job))
    answers = four.run(lit.run, schedule=schedule, **job)
    assert furthest(without_means(of_rank_0(answers)["rows"]), without_means(still["rows"])) < NEAR
    assert [answer["steps"] for answer in answers] == [12] * 4


def test_callbacks_that_monitor(four: RankPool, tmp_path: Path) -> None:
    """The best checkpoint and an early end, decided alike by who came late."""
    theirs = of_rank_0(four.run(lit.run, folder=tmp_path / "theirs", block=None, monitors=True, **JOB, seconds=120))
    job = {**OF_TWO, "schedule": SCHEDULE, "monitors": True, "seconds": 120}
    ours = of_rank_0(four.run(lit.run, folder=tmp_path / "ours", **job))
    assert (ours["steps"], ours["best"]) == (theirs["steps"], theirs["best"]) == (10, "best-10.ckpt")
    assert furthest(without_means(ours["rows"]), without_means(theirs["rows"])) < NEAR
    assert [each.name for each in (tmp_path / "ours").iterdir()] == ["best-10.ckpt"]


def test_layers_that_are_cut_as_they_are_made(four: RankPool, tmp_path: Path) -> None:
    """`configure_model` at ZeRO 3, on three of four processes."""
    job = {"folder": tmp_path, "stage": 3, "is_late": True, "seconds": 120, **JOB}
    theirs = of_rank_0(four.run(lit.run, block=None, **job))
    config = {"train_batch_size": 12}
    block = {"layout": {"data": 3}}
    ours = of_rank_0(four.run(lit.run, block=block, config=config, schedule={6: {"data": 4}}, **job))
    assert furthest(without_means(ours["rows"]), without_means(theirs["rows"])) < NEAR


def test_the_example(tmp_path: Path) -> None:
    """Both of its commands."""
    script = ("examples/train_gpt_lightning.py", "--steps", "12", "--out", str(tmp_path))
    assert "step 12: " in launched(4, *script)
    printed = launched(3, *script, "--resume")
    assert "Restored all states" in printed and "step 16: " in printed


class Stopping(Callback):
    """The scheduler of a cluster takes the machine."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        pl_module.seen.clear()  # or it would travel in the checkpoint
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: Path) -> dict[str, Any]:
    """A job that is told to end."""
    block = {"fallback": {"path": str(folder), "on_sigterm": True}}
    strategy = lit.strategy_of(block)
    trainer = lit.trainer_of(folder, strategy, [Stopping()], max_epochs=2)
    code: Any = None
    try:
        trainer.fit(lit.Module(), lit.DataLoader(lit.Points(72), batch_size=3))
    except SystemExit as end:
        code = end.code
    finally:
        strategy.engine.destroy()
    return {"code": code, "steps": trainer.global_step}


def test_what_sigterm_leaves_is_gone_on_from(four: RankPool, tmp_path: Path) -> None:
    said = four.run(stopped, folder=tmp_path, seconds=120)
    assert len({answer["steps"] for answer in said}) == 1 and said[0]["steps"] < 12
    (left,) = [each for each in tmp_path.iterdir() if (each / "checkpoint.json").is_file()]
    job = {"folder": tmp_path, "block": {"layout": {"data": 2}}, "accumulate_grad_batches": 2, "max_epochs": 2}
    again = of_rank_0(four.run(lit.run, resume=left.name, **job, seconds=120))
    still = of_rank_0(four.run(lit.run, folder=tmp_path, block={}, max_epochs=2, seconds=120))
    after = said[0]["steps"]
    assert furthest(without_means(again["rows"]), without_means(still["rows"], after=after)) < NEAR
