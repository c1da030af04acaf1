"""What a Lightning Trainer over a world that changes refuses, each by name and with a way out; and odd ways of use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, WeightedRandomSampler

import ds_dynatrain
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from ds_dynatrain.integrations.lightning import DynatrainStrategy, SwitchCallback, names, refusals, settings
from ds_dynatrain.integrations.shared.names import check
from tests.engine.pool import RankPool
from tests.integrations import lit


class Manual(lit.Module):
    """It steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Drawing(lit.Module):
    """It draws batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        raise NotImplementedError


class Requeueing(TorchElasticEnvironment):
    """As that of SLURM, which is not here."""

    auto_requeue = True


OF_STRATEGY: dict[str, dict[str, Any]] = {
    "a layout with pipe, tensor, expert or sequence": {"config": {"dynatrain": {"layout": {"tensor": 2}}}},
    "dynatrain.resume": {"config": {"dynatrain": {"resume": {"path": "out"}}}},
    "load_full_weights": {"load_full_weights": True},
    "exclude_frozen_parameters": {"exclude_frozen_parameters": True},
}
"""By the name of a refusal, what asks for it."""
OF_TRAINER: dict[str, dict[str, Any]] = {
    "manual optimization": {"module": Manual},
    "training_step(dataloader_iter)": {"module": Drawing},
    "overfit_batches": {"overfit_batches": 2},
    "limit_train_batches": {"limit_train_batches": 0.5},
    "use_distributed_sampler=False": {"use_distributed_sampler": False},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "GradientAccumulationScheduler": {"callbacks": [callbacks.GradientAccumulationScheduler({0: 2})]},
    "StochasticWeightAveraging and WeightAveraging": {"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]},
    "BatchSizeFinder and LearningRateFinder": {"callbacks": [callbacks.LearningRateFinder()]},
    "BaseFinetuning and ModelPruning": {"callbacks": [callbacks.BackboneFinetuning()]},
    "SLURM's auto-requeue": {"environment": Requeueing()},
    "OnExceptionCheckpoint and ModelCheckpoint(save_on_exception=True)": {
        "callbacks": [callbacks.ModelCheckpoint(save_on_exception=True)],
        "enable_checkpointing": True,
    },
}


def said_by(call: Callable[[], Any]) -> str:
    """The message of the error that it raises."""
    with pytest.raises((UnsupportedError, ConfigError, DataError, CheckpointError)) as caught:
        call()
    return str(caught.value)


def fit(
    loader: Any = None, module: Callable[[], Any] = lit.Module, path: str | None = None, then: Any = None, **named: Any
) -> None:
    """A Trainer's `fit` over training data, which does not come to its first step; then: another call."""
    strategy = lit.strategy_of({}, **named.pop("config", {}))
    trainer = lit.trainer_of(Path("unused"), strategy, **{"max_steps": 1, "barebones": False, **named})
    made = module()
    try:
        trainer.fit(made, points() if loader is None else loader, ckpt_path=path)
        if then is not None:
            then(trainer, made)
    finally:
        if strategy.engine is not None:
            strategy.engine.destroy()


def points(**named: Any) -> DataLoader[Any]:
    """A training loader."""
    return DataLoader(lit.Points(24), **{"batch_size": 6, "shuffle": True, **named})


def strategy_case() -> dict[str, str]:
    """The message of each refusal of a strategy."""
    found = {name: said_by(lambda asked=asked: DynatrainStrategy(**asked)) for name, asked in OF_STRATEGY.items()}
    with replaced(settings, worker_place=lambda: object()):
        found["no global batch"] = said_by(lambda: settings.sizes_of({"dynatrain": {}}, 6, 1, 1))
    found["no block"] = said_by(lambda: DynatrainStrategy(config={"zero_optimization": {"stage": 1}}))
    return found


def test_what_a_strategy_is_given(alone: RankPool) -> None:
    said = alone.run(strategy_case)[0]
    assert "needs a configuration with a 'dynatrain' block" in said.pop("no block")
    assert "train_batch_size is not given: where nodes come and go" in said.pop("no global batch")
    assert said == {each.name: f"{each.name}: {each.why}; {each.instead}" for each in refusals.STRATEGY}


def trainer_case() -> dict[str, str]:
    """The message of each refusal of a Trainer and its module."""
    return {name: said_by(lambda asked=asked: fit(**asked)) for name, asked in OF_TRAINER.items()}


def test_what_a_trainer_is_given(alone: RankPool) -> None:
    said = alone.run(trainer_case)[0]
    assert said == {each.name: f"{each.name}: {each.why}; {each.instead}" for each in refusals.TRAINER}


def data_case(folder: Path) -> dict[str, str]:
    """Loaders, sizes and folders."""
    foreign = folder / "weights.ckpt"
    foreign.write_text("none")
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    own = torch.utils.data.BatchSampler(range(24), 3, False)
    found = {
        "stream": said_by(lambda: fit(DataLoader(lit.Stream(24), batch_size=3), val_check_interval=0.5)),
        "two": said_by(lambda: fit({"one": points(), "other": points()})),
        "list": said_by(lambda: fit([[1, 2], [3, 4]])),
        "sampler": said_by(lambda: fit(points(sampler=sampler, shuffle=False))),
        "batch sampler": said_by(lambda: fit(DataLoader(lit.Points(24), batch_sampler=own))),
        "sizes": said_by(lambda: fit(config={"train_micro_batch_size_per_gpu": 2})),
        "folder": said_by(lambda: fit(path=str(foreign))),
        "elsewhere": said_by(lambda: fit(path="s3://somewhere/step.ckpt")),
        "of another job": said_by(lambda: fit(module=lambda: lit.Module("none"), path=str(saved_by_hand(folder)))),
        "validate": said_by(lambda: lit.trainer_of(folder, lit.strategy_of({})).validate(lit.Module(), points())),
        "twice": said_by(lambda: fit(then=lambda trainer, module: trainer.fit(module, points()))),
        "another module": said_by(lambda: fit(then=lambda trainer, module: trainer.test(lit.Module(), points()))),
        "switch": said_by(
            lambda: lightning.Trainer(
                accelerator="cpu", devices=1, callbacks=[SwitchCallback({})], logger=False, max_steps=1
            ).fit(lit.Module("none"), points())
        ),
        "names": said_by(lambda: check({"lightning.pytorch.trainer.call": "not_there"}, "lightning", "lightning")),
    }
    return found


def saved_by_hand(folder: Path) -> Path:
    """A checkpoint of a loop without Lightning, of the same model."""
    module, config = lit.Module("none"), {**lit.CONFIG, "train_batch_size": 6, "dynatrain": {}}
    made = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine, *_ = ds_dynatrain.initialize(model=module, optimizer=made, config=config)
    engine.save(folder, "by-hand")
    engine.destroy()
    return folder / "by-hand"


def test_its_data_and_its_folders(alone: RankPool, tmp_path: Path) -> None:
    said = alone.run(data_case, folder=tmp_path)[0]
    assert "is a part of an epoch, and a stream has no length" in said["stream"]
    assert "several training DataLoaders" in said["two"] and "several training DataLoaders" not in said["list"]
    assert "the training loader is a list" in said["list"]
    assert "sampler of its own" in said["sampler"] and "sampler of its own" in said["batch sampler"]
    assert "is 2 and the training DataLoader has batches of 6" in said["sizes"]
    assert "neither a checkpoint of ds_dynatrain nor one of Lightning's" in said["folder"]
    assert "give a path in a shared file system" in said["elsewhere"]
    assert "is not of a Lightning job" in said["of another job"]
    assert "trainer.validate without trainer.fit" in said["validate"]
    assert "a second trainer.fit" in said["twice"]
    assert "trainer.test without trainer.fit of this module" in said["another module"]
    assert "which cannot switch" in said["switch"]
    assert "has no lightning.pytorch.trainer.call.not_there" in said["names"] and "[lightning]" in said["names"]
    check(names.NAMES, "lightning", "lightning")


class WithPoints(lightning.LightningDataModule):
    """Data with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"kept": 3, "left out": object()})
        self.asked = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.asked += 1
        return points()

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"] + 10


def by_name_case(folder: Path) -> dict[str, Any]:
    """`strategy="dynatrain"` as it is, a data module, hyper-parameters that are no plain values, saves by hand."""
    found: dict[str, Any] = {}
    for number in range(2):
        data = WithPoints()
        trainer = lit.trainer_of(folder, "dynatrain", max_steps=3 + number)
        module = lit.Module()
        module.deepspeed = lit.deepspeed.ops.__compatible_ops__  # a table that is no part of its state
        path = str(folder / "by hand.ckpt")
        trainer.fit(module, datamodule=data, ckpt_path=path if number else None)
        trainer.save_checkpoint(path)
        found[f"steps {number}"], found[f"asked {number}"] = trainer.global_step, data.asked
        found[f"layout {number}"] = str(trainer.strategy.engine.layout)
        trainer.strategy.engine.destroy()
    return found


def test_by_its_name(alone: RankPool, tmp_path: Path) -> None:
    said = alone.run(by_name_case, folder=tmp_path)[0]
    assert (said["steps 0"], said["steps 1"]) == (3, 4)
    assert (said["asked 0"], said["asked 1"]) == (1, 11)
    assert said["layout 0"] == "data=1 zero_stage=2"


def epochs_case(folder: Path) -> dict[tuple[int, bool], str]:
    """What is said of a checkpoint of Lightning's own strategy, by the number of samples and `drop_last`."""
    found = {}
    for samples, drop_last in ((24, False), (27, False), (27, True)):
        job: dict[str, Any] = {"samples": samples, "drop_last": drop_last, "accumulate_grad_batches": 2}
        kept = folder / f"{samples}-{drop_last}"
        lit.run(kept, None, save=2, max_epochs=1, **job)
        try:
            lit.run(kept, {}, resume="step=2.ckpt", max_epochs=2, config={"train_batch_size": 6}, **job)
            found[samples, drop_last] = ""
        except ConfigError as error:
            found[samples, drop_last] = str(error)
    return found


def test_a_stock_checkpoint_with_other_epochs(alone: RankPool, tmp_path: Path) -> None:
    """27 samples, 3 x 2: there the 9th micro-batch of an epoch begins a step that ends in the next one."""
    found = alone.run(epochs_case, folder=tmp_path, seconds=120)[0]
    assert not found[24, False]
    assert "27 samples have 9 micro-batches" in found[27, False] and "5 whole steps of 6 samples" in found[27, False]
    assert "27 samples have 9 micro-batches" in found[27, True] and "4 whole steps of 6 samples" in found[27, True]
