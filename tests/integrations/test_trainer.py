"""Trainer on ranks whose world changes, against stock Trainer with the same global batch."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.docs.pages import ROOT, blocks
from tests.engine.pool import RankPool
from tests.integrations import trainers

PAGE = ROOT / "docs" / "models.md"
BATCH = 12
SCHEDULE = {3: {"data": 4, "zero_stage": 3}, 6: {"data": 3, "zero_stage": 2}}
EACH = {"eval_strategy": "steps", "eval_steps": 3, "ragged": True}
Log = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def stock_log(alone: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Of stock Trainer on one rank, in micro-batches of 3: 8 steps are an epoch, and 4 more."""
    folder = tmp_path_factory.mktemp("stock")
    found = alone.run(trainers.train, folder=folder, block=None, **OF_ONE, **EACH)
    log: Log = found[0]["log"]
    return log


OF_ONE: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 12}
OF_TWO: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 12}


def of_rank_0(answers: Sequence[Any]) -> Any:
    """What the process at rank 0 saw."""
    return next(answer for answer in answers if answer["rank"] == 0 and "let go" not in answer)


def furthest(log: Log, other: Log) -> tuple[tuple[int, str], float]:
    """Where two logs, which must have the same rows, are furthest apart, and by how much of the value."""
    assert [sorted(row) for row in log] == [sorted(row) for row in other]
    far = {
        (row["step"], name): abs(row[name] - same[name]) / max(abs(same[name]), 1e-9)
        for row, same in zip(log, other, strict=True)
        for name in row
    }
    place = max(far, key=lambda place: far[place])
    return place, far[place]


def steps_of(log: Log) -> Log:
    """Without the mean over all steps, which says how long a process was there."""
    return [row for row in log if "train_loss" not in row]


class OwnLoader(trainers.Trainer):
    """Makes its DataLoader by itself, as subclasses do, and lets Accelerate prepare it."""

    def get_train_dataloader(self) -> Any:
        made: Any = DataLoader(self.train_dataset, batch_size=3, shuffle=True, collate_fn=self.data_collator)  # type: ignore[arg-type]
        return self.accelerator.prepare(made)


@pytest.mark.parametrize(
    ("ragged", "kind"),
    [pytest.param(False, trainers.Trainer, marks=pytest.mark.full), (True, trainers.Trainer), (False, OwnLoader)],
)
def test_on_one_rank_every_bit_is_stock_trainers(
    alone: RankPool, tmp_path: Path, ragged: bool, kind: type[trainers.Trainer]
) -> None:
    job = {"folder": tmp_path, "ragged": ragged, "kind": kind, "gradient_accumulation_steps": 2, "max_steps": 6}
    logs = [alone.run(trainers.train, block=block, **job)[0]["log"] for block in (None, {})]
    assert logs[0] == logs[1] and len(logs[0]) == 7


def test_a_world_that_changes(four: RankPool, stock_log: Log, tmp_path: Path) -> None:
    """2 -> 4 -> 3 ranks and ZeRO 1 -> 3 -> 2, within an epoch, with evaluation and saves at each change."""
    block = {"layout": {"data": 2}}
    saves = {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True}
    answers = four.run(
        trainers.train, folder=tmp_path, block=block, schedule=SCHEDULE, **OF_TWO, **EACH, **saves, seconds=120
    )
    found = of_rank_0(answers)
    assert furthest(found["log"], stock_log)[1] < 2e-5, furthest(found["log"], stock_log)
    switches = [(row["step"], row["dynatrain/world_size"]) for row in found["switches"]]
    assert switches == [(step + 1, sizes["data"]) for step, sizes in SCHEDULE.items()]
    assert all(row["dynatrain/pause_ms"] > 0 for row in found["switches"])
    assert (found["world"], found["layout"]) == (3, "data=3 zero_stage=2")
    assert found["best"] is not None and Path(found["best"]).parent == tmp_path
    best = load_file(Path(found["best"]) / "model.safetensors")["transformer.wte.weight"]
    last = load_file(tmp_path / "checkpoint-12/model.safetensors")["transformer.wte.weight"]
    assert torch.equal(found["words"], best) and not torch.equal(best, last)
    assert [answer.get("let go", False) for answer in answers].count(True) == 1
    names = sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-12", "checkpoint-3", "checkpoint-6", "checkpoint-9"]
    for step in (3, 6, 9, 12):  # also right after a switch to stage 3, where each rank has a part
        shapes = {
            name: held.shape for name, held in load_file(tmp_path / f"checkpoint-{step}/model.safetensors").items()
        }
        assert shapes == {name: held.shape for name, held in trainers.model().state_dict().items() if name in shapes}
        assert "transformer.wte.weight" in shapes


def test_a_stream_in_a_world_that_changes(alone: RankPool, four: RankPool, tmp_path: Path) -> None:
    """Twelve steps of a stream of 96 samples, which ends after eight: losses are those of stock Trainer on one rank."""
    job = {"folder": tmp_path, "data": trainers.Stream}
    stock = alone.run(trainers.train, block=None, **job, **OF_ONE)[0]["log"]
    block = {"layout": {"data": 2}}
    found = of_rank_0(four.run(trainers.train, block=block, schedule=SCHEDULE, **job, **OF_TWO, seconds=120))
    assert found["layout"] == "data=3 zero_stage=2" and len(stock) == 13
    assert furthest(steps_of(found["log"]), steps_of(stock))[1] < 2e-5


class Grouped(trainers.Trainer):
    """Trains texts that are padded to the longest of their micro-batch."""

    def get_train_dataloader(self) -> Any:
        self.data_collator = padded
        return super().get_train_dataloader()


def padded(texts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.utils.rnn.pad_sequence([text[name] for text in texts], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("labels", -100))
    }


def of_many_lengths(count: int) -> list[dict[str, torch.Tensor]]:
    texts = trainers.Texts(count)
    lengths = [4 + number * 7 % 13 for number in range(count)]
    return [{name: row[:length] for name, row in texts[index].items()} for index, length in enumerate(lengths)]


def test_groups_by_length_in_a_world_that_changes(alone: RankPool, four: RankPool, tmp_path: Path) -> None:
    job = {"folder": tmp_path, "data": of_many_lengths, "kind": Grouped, "train_sampling_strategy": "group_by_length"}
    logs = [of_rank_0(alone.run(trainers.train, block={}, **job, **OF_ONE))["log"]]
    block = {"layout": {"data": 2}}
    found = of_rank_0(four.run(trainers.train, block=block, schedule=SCHEDULE, **job, **OF_TWO, seconds=120))
    assert found["layout"] == "data=3 zero_stage=2" and len(logs[0]) == 13
    assert furthest(steps_of(found["log"]), steps_of(logs[0]))[1] < 2e-5


@pytest.mark.parametrize("data", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_stock_checkpoint_goes_on_in_another_world(four: RankPool, tmp_path: Path, data: int) -> None:
    """Saved by stock Trainer on 4 ranks in the middle of an epoch."""
    job = {"folder": tmp_path, "max_steps": 8, **EACH}
    saves = {"save_strategy": "steps", "save_steps": 5}
    whole = of_rank_0(four.run(trainers.train, block=None, **job, **saves, seconds=120))["log"]
    assert (tmp_path / "checkpoint-5").is_dir()
    answers = four.run(
        trainers.train,
        block={"layout": {"data": data}},
        resume=str(tmp_path / "checkpoint-5"),
        config={"train_batch_size": BATCH},
        **job,
        seconds=120,
    )
    resumed = of_rank_0(answers)["log"]
    assert furthest(steps_of(resumed), steps_of(whole))[1] < 2e-5


@pytest.mark.full
def test_ours_goes_on_in_another_world(four: RankPool, stock_log: Log, tmp_path: Path) -> None:
    """`True` finds the newest that is whole; the log goes on where it was."""
    saves = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}
    begin = {**OF_TWO, "max_steps": 10, "num_train_epochs": 2}
    four.run(
        trainers.train, folder=tmp_path, block={"layout": {"data": 2}}, **{**begin, "max_steps": 12}, **EACH, **saves
    )
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]
    (tmp_path / "checkpoint-12").rename(tmp_path / "whole")
    (tmp_path / "checkpoint-99").mkdir()  # of a save that was cut off
    four.run(
        trainers.train, folder=tmp_path, block={"layout": {"data": 2}}, schedule={}, **OF_TWO, **EACH,
        save_strategy="steps", save_steps=7, callbacks=(StopAt(7),),
    )  # fmt: skip
    answers = four.run(
        trainers.train, folder=tmp_path, block={"layout": {"data": 3}}, stage=3, resume=True,
        config={"train_batch_size": BATCH}, **OF_TWO, **EACH,
    )  # fmt: skip
    found = of_rank_0(answers)["log"]
    assert furthest(steps_of(found), steps_of(stock_log))[1] < 2e-5
    assert math.isfinite(found[-1]["train_loss"])


class StopAt(trainers.TrainerCallback):
    """Ends the training after a step, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def test_sigterm_leaves_a_checkpoint(four: RankPool, stock_log: Log, tmp_path: Path) -> None:
    """All save at the next step and end with 143; `True` finds it, and the log goes on as if nothing had been."""
    block = {"layout": {"data": 2}, "fallback": {"on_sigterm": True}}
    job = {"folder": tmp_path, "block": block, **OF_TWO, **EACH, "config": {"train_batch_size": BATCH}}
    codes = four.run(ended_case, job=job)
    assert codes.count(143) == 2
    (saved,) = tmp_path.glob("checkpoint-*")
    assert saved.name in ("checkpoint-5", "checkpoint-6", "checkpoint-7")
    block["layout"] = {"data": 3}
    found = of_rank_0(four.run(trainers.train, resume=True, **job, seconds=120))["log"]
    assert furthest(steps_of(found), steps_of(stock_log))[1] < 2e-5


def ended_case(job: dict[str, Any]) -> int:
    """The code that this process would end with. Rank 1 gets SIGTERM after step 5."""
    try:
        trainers.train(**job, callbacks=(Ending(5),))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class Ending(trainers.TrainerCallback):
    """Sends this process SIGTERM, if it is rank 1, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_more_steps_than_before(alone: RankPool, tmp_path: Path) -> None:
    """How many is the arguments' affair, also where a job goes on."""
    saves = {"folder": tmp_path, "block": {}, "save_strategy": "steps", "save_steps": 2}
    alone.run(trainers.train, **saves, max_steps=2)
    log = alone.run(trainers.train, **saves, max_steps=5, resume=True)[0]["log"]
    assert [row["step"] for row in log if "loss" in row] == [1, 2, 3, 4, 5]


def test_another_global_batch_is_refused(alone: RankPool, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    for block, folder in ((None, tmp_path / "stock"), ({}, tmp_path / "ours")):
        alone.run(trainers.train, folder=folder, block=block, **saves)
        message = alone.run(refused_case, folder=folder, resume=str(folder / "checkpoint-2"))[0]
        assert "3" in message and "6" in message and "train_batch_size" in message


def refused_case(folder: Path, resume: str, match: str = "train_batch_size", **more: Any) -> str:
    """The message of an error."""
    with pytest.raises(Exception, match=match) as caught:
        trainers.train(folder, {}, resume=resume, **{"config": {"train_batch_size": 6}, "max_steps": 4, **more})
    return str(caught.value)


def test_a_stock_checkpoint_with_other_epochs_is_refused(alone: RankPool, tmp_path: Path) -> None:
    """27 samples with drop_last, 3 x 2: there the 5th step of an epoch has one micro-batch, here there are 4.

    Without drop_last it goes on just as there, but for `epoch`, which counts steps here and micro-batches there.
    """
    job = {"samples": 27, "max_steps": 7, "gradient_accumulation_steps": 2}
    saves = {"save_strategy": "steps", "save_steps": 3, "dataloader_drop_last": True}
    whole = alone.run(trainers.train, folder=tmp_path, block=None, **job, **saves)[0]["log"]
    again = {"folder": tmp_path, "resume": str(tmp_path / "checkpoint-3"), **job}
    said = alone.run(refused_case, **again, match="drop_last", dataloader_drop_last=True)[0]
    assert "have 5 optimizer steps" in said and "an epoch has 4 steps" in said and "the last one of 3 samples" in said
    resumed = alone.run(trainers.train, block={}, **again)[0]["log"]
    logs = [[{**row, "epoch": 0.0} for row in steps_of(log)] for log in (resumed, whole)]
    assert furthest(*logs)[1] < 2e-5


@pytest.mark.full
def test_a_second_training(four: RankPool, tmp_path: Path) -> None:
    """It begins anew with the weights of the first one, as a trainer of them does; a switch in each."""
    found = of_rank_0(four.run(twice_case, folder=tmp_path, seconds=120))
    first, second, fresh = found["logs"]
    assert len(found["said"]) == 1, "one line for a switch"
    assert re.match(r"switch 2 at step 2: data=2 zero_stage=1 -> data=4 zero_stage=3 in \d+ ms", found["said"][0])
    assert [row["step"] for row in second] == [1, 2, 3, 4, 4] and second[0]["loss"] < first[0]["loss"]
    assert furthest(second, fresh)[1] < 1e-6


def twice_case(folder: Path) -> dict[str, Any]:
    """The logs of two calls of `train`, and of another trainer that begins with the weights between them."""
    trainers.allow_ranks()
    trainers.forget_ranks()
    job = {"block": {"layout": {"data": 2}}, "max_steps": 4, "gradient_accumulation_steps": 2}
    switch = trainers.SwitchCallback({2: {"data": 4, "zero_stage": 3}})
    given = {"train_dataset": trainers.Texts(48), "callbacks": [switch]}
    made: Any = trainers.elastic(trainers.Trainer)
    trainer = made(model=trainers.model(), args=trainers.arguments(folder, **job), **given)
    logs, out = [], StringIO()
    logger, handler = logging.getLogger("ds_dynatrain"), logging.StreamHandler(out)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with redirect_stdout(out), redirect_stderr(out):
        trainer.train()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logs.append(trainers.logged(trainer))
    weights = {name: held.detach().clone() for name, held in trainer.engine.module_state_dict().items()}
    trainer.train()
    logs.append(trainers.logged(trainer))
    trainer.engine.destroy()
    trainers.forget_ranks()
    model = trainers.model()
    model.load_state_dict(weights)
    trainer = made(model=model, args=trainers.arguments(folder, **job), **given)
    trainer.train()
    logs.append(trainers.logged(trainer))
    trainer.engine.destroy()
    said = [line for line in out.getvalue().splitlines() if "data=2 zero_stage=1" in line]
    return {"rank": trainer.args.process_index, "logs": logs, "said": said}


@pytest.mark.full
def test_an_average_of_the_weights(four: RankPool, alone: RankPool, tmp_path: Path) -> None:
    """The callback on the page, at stage 3 and on ranks that come later, against one rank without shards."""
    (whole,) = alone.run(average_case, folder=tmp_path, stage=0, layout={"data": 1}, accumulation=4, schedule={})
    found = four.run(
        average_case, folder=tmp_path, stage=3, layout={"data": 2}, accumulation=2, schedule={2: {"data": 4}}
    )
    for average in found:  # a key's bias has no gradient but rounding, of which Adam makes steps of 1e-5
        assert average.keys() == whole.keys()
        torch.testing.assert_close(average, whole, rtol=1e-5, atol=1e-5)


def average_case(
    folder: Path, stage: int, layout: Mapping[str, int], accumulation: int, schedule: Mapping[int, Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """What the callback on the page has after four steps."""
    trainers.allow_ranks()
    trainers.forget_ranks()
    names: dict[str, Any] = {"deepspeed": deepspeed, "TrainerCallback": trainers.TrainerCallback}
    (page,) = (text for text in blocks(PAGE, "py") if text.startswith("class Averaging"))
    exec(page, names)
    args = trainers.arguments(
        folder, {"layout": dict(layout)}, stage=stage, max_steps=4, gradient_accumulation_steps=accumulation
    )
    model = trainers.model()
    averaging = names["Averaging"](model)
    made: Any = trainers.elastic(trainers.Trainer)
    callbacks = [averaging, trainers.SwitchCallback(schedule)]
    names["trainer"] = trainer = made(model=model, args=args, train_dataset=trainers.Texts(48), callbacks=callbacks)
    try:
        trainer.train()
    finally:
        trainer.engine.destroy()
    return dict(averaging.average)


@pytest.mark.full
def test_weights_after_a_change_of_stage(four: RankPool, tmp_path: Path) -> None:
    """`save_model` gives the whole model, whatever the stage is now."""
    (found,) = {str(answer) for answer in four.run(saved_case, folder=tmp_path) if answer is not None}
    assert found == "True"


def saved_case(folder: Path) -> bool | None:
    """Stage 1, then 3; what is saved then is what the masters are."""
    trainers.allow_ranks()
    trainers.forget_ranks()
    args = trainers.arguments(folder, {"layout": {"data": 2}}, max_steps=4, gradient_accumulation_steps=2)
    callbacks = [trainers.SwitchCallback({2: {"data": 3, "zero_stage": 3}})]
    made: Any = trainers.elastic(trainers.Trainer)
    trainer = made(model=trainers.model(), args=args, train_dataset=trainers.Texts(48), callbacks=callbacks)
    try:
        trainer.train()
        trainer.save_model(str(folder / "model"))
        torch.distributed.barrier()
        weights = {name: held.detach().clone() for name, held in trainer.engine.module_state_dict().items()}
        saved = load_file(folder / "model" / "model.safetensors")
        trainer.engine.switch(data=3, zero_stage=1, at=trainer.engine.global_steps)
        trainer.engine.boundary()
        weights = {name: held.cpu() for name, held in trainer.engine.module.named_parameters()}
        return all(torch.equal(held, weights[name]) for name, held in saved.items()) and len(saved) >= 27
    finally:
        trainer.engine.destroy()
