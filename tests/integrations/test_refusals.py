"""What an elastic trainer refuses, each by name and with a way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.integrations.huggingface import refusals
from ds_dynatrain.integrations.huggingface.refusals import ARGUMENTS, TRAINERS
from ds_dynatrain.integrations.transformers import elastic
from tests.engine.pool import RankPool
from tests.integrations import trainers

ASKED: dict[str, dict[str, Any]] = {
    "train_sampling_strategy='batch_rebalance'": {"train_sampling_strategy": "batch_rebalance"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "dispatch_batches and split_batches": {"accelerator_config": {"split_batches": True}},
    "ParallelismConfig": {"parallelism_config": object()},
    "tensor_parallel.autotp_size (tp_model_init)": {"config": {"tensor_parallel": {"autotp_size": 2}}},
    "a layout with pipe, tensor, expert or sequence": {"block": {"layout": {"tensor": 2}}},
    "ignore_data_skip": {"ignore_data_skip": True},
}
"""By the name of each refusal, what asks for it."""


def message_of(kind: type[Trainer], data: Any, args: TrainingArguments) -> str:
    """Of the error that its constructor raises."""
    with pytest.raises((UnsupportedError, ConfigError)) as caught:
        elastic(kind)(model=trainers.model(), args=args, train_dataset=data)
    return str(caught.value)


def arguments_case(folder: Path) -> dict[str, str]:
    """The message of each refusal of arguments."""
    trainers.allow_ranks()
    found = {}
    for name, asked in ASKED.items():
        trainers.forget_ranks()
        given = dict(asked)
        block, later = given.pop("block", {}), {}
        if name == "ParallelismConfig":  # its own constructor wants as many processes
            later, given = given, {}
        args = trainers.arguments(folder, block, **given)
        for key, value in later.items():
            setattr(args, key, value)
        found[name] = message_of(Trainer, trainers.Texts(24), args)
    return found


def test_arguments(alone: RankPool, tmp_path: Path) -> None:
    assert set(ASKED) == {refusal.name for refusal in ARGUMENTS}
    said = alone.run(arguments_case, folder=tmp_path)[0]
    for refusal in ARGUMENTS:
        assert said[refusal.name] == f"{refusal.name}: {refusal.why}; {refusal.instead}"


def others_case(folder: Path) -> dict[str, str]:
    """Trainers, data, and configurations that lack something."""
    trainers.allow_ranks()
    found = {}
    for name in TRAINERS:
        trainers.forget_ranks()
        kind = type("Mine", (type(name, (Trainer,), {}),), {})
        found[name] = message_of(kind, trainers.Texts(24), trainers.arguments(folder, {}))
    trainers.forget_ranks()
    found["no block"] = message_of(Trainer, trainers.Texts(24), trainers.arguments(folder, None))
    trainers.forget_ranks()
    found["no DeepSpeed"] = message_of(Trainer, trainers.Texts(24), TrainingArguments(output_dir=str(folder)))
    return found


def test_trainers_data_and_configurations(alone: RankPool, tmp_path: Path) -> None:
    said = alone.run(others_case, folder=tmp_path)[0]
    for name in TRAINERS:
        assert said[name].startswith(f"{name}: it deals prompts") and "SFTTrainer" in said[name]
    assert "no 'dynatrain' block in it" in said["no block"]
    assert "no DeepSpeed configuration" in said["no DeepSpeed"]


def batch_sampler_case(folder: Path) -> str:
    """A trainer whose loader has an order of its own."""

    class Sampling(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)

    with pytest.raises(Exception, match="sampler of its own") as caught:
        trainers.train(folder, {}, kind=Sampling, samples=24, max_steps=2)
    return str(caught.value)


def test_a_sampler_of_its_own(alone: RankPool, tmp_path: Path) -> None:
    assert "WeightedRandomSampler" in alone.run(batch_sampler_case, folder=tmp_path)[0]


def test_loaders_of_subclasses() -> None:
    """What is no DataLoader, and other batches; `test_trainer.py` has one that works."""
    refusals.refuse_loader(torch.utils.data.DataLoader(trainers.Texts(24), batch_size=3), 3)
    with pytest.raises(UnsupportedError, match="returned a list: samples are dealt to a world"):
        refusals.refuse_loader([], 3)
    with pytest.raises(ConfigError, match="batches of 4 samples, and per_device_train_batch_size is 3"):
        refusals.refuse_loader(torch.utils.data.DataLoader(trainers.Texts(24), batch_size=4), 3)


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_second_training(monkeypatch: pytest.MonkeyPatch, is_elastic: bool) -> None:
    """Refused where not all processes come to it; `test_trainer.py` has one that works."""
    monkeypatch.setattr(refusals, "worker_place", lambda: object() if is_elastic else None)
    engine = SimpleNamespace(members=(0, 1), _parts=SimpleNamespace(candidates=range(3)))
    with pytest.raises(UnsupportedError, match="elastic launch" if is_elastic else "1 of 3 processes are idle"):
        refusals.refuse_second_training(engine)


def reference_case(folder: Path) -> str:
    """A model that is not trained, at stage 3."""
    import deepspeed

    trainers.allow_ranks()
    with pytest.raises(UnsupportedError) as caught:
        deepspeed.initialize(model=trainers.model(), config={"dynatrain": {}, "zero_optimization": {"stage": 3}})
    return str(caught.value)


def test_a_reference_model_at_stage_3(alone: RankPool, tmp_path: Path) -> None:
    assert "precompute_ref_log_probs=True" in alone.run(reference_case, folder=tmp_path)[0]
