"""A user's script with a Trainer of Lightning, which evaluates and saves; otherwise as `elastic_worker.py`.

torchrun ... elastic_lightning.py SETTINGS OUT

Where SETTINGS has `steps`, it neither evaluates nor saves; `evaluation`: seconds for each batch of an evaluation;
`stream`: whether it trains on a stream.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from ds_dynatrain.integrations.lightning import DynatrainStrategy
from tests.scenarios.models import MODELS, Texts, build

settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
out = Path(sys.argv[2])
log = (out / f"{os.getpid()}.jsonl").open("a", buffering=1)


class Stream(IterableDataset[Any]):
    """The texts without an index, in the orders in which Lightning shuffles epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        texts, drawn = Texts(), torch.Generator().manual_seed(self.epoch)
        return (texts[index] for index in torch.randperm(len(texts), generator=drawn).tolist())


class Module(lightning.LightningModule):
    """A model that logs its losses, and a metric of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.mean = build(settings["model"]), torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        numbers, *data = batch
        loss: torch.Tensor = MODELS[settings["model"]].loss(self.model, *data)
        engine, samples = self.trainer.strategy.engine, self.trainer.strategy.samples
        if not engine.is_discarded and samples:
            self.say("batch", self.trainer.global_step, loss=loss.item(), samples=numbers[:samples].tolist())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = MODELS[settings["model"]].loss(self.model, *batch[1:])
        self.mean(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("metric", self.mean)
        time.sleep(settings.get("evaluation", 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=settings["config"]["optimizer"]["params"]["lr"])

    def say(self, event: str, step: int, **more: Any) -> None:
        """Write one line."""
        engine = self.trainer.strategy.engine
        line = {"event": event, "step": step, "run": settings["run"], "generation": engine.generation}
        log.write(json.dumps({**line, "pid": os.getpid(), "layout": str(engine.layout), **more}) + "\n")


class Telling(Callback):
    """Writes what each step and each evaluation has, and ends the training."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stop, step = out / "stop", trainer.global_step
        place = {"epoch": trainer.current_epoch, "batch_idx": batch_idx}
        pl_module.say("step", step - 1, rank=trainer.global_rank, size=trainer.world_size, **place)
        is_over = stop.exists() and step > int(stop.read_text())
        trainer.should_stop = trainer.should_stop or is_over or step == settings.get("steps")
        time.sleep(settings["pause"])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            numbers = {name: float(trainer.callback_metrics[name]) for name in ("val_loss", "metric")}
            pl_module.say("evaluated", trainer.global_step, **numbers)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {key: value for key, value in settings["config"].items() if key != "optimizer"}
    is_alone = "steps" in settings
    trainer = lightning.Trainer(
        accelerator="cpu", devices=settings["workers"], strategy=DynatrainStrategy(config=config), max_epochs=-1,
        callbacks=[Telling()] if is_alone else [
            Telling(),
            ModelCheckpoint(out / "lightning", every_n_train_steps=7, save_last=True),
            EarlyStopping("val_loss", patience=100_000),
        ],
        limit_val_batches=0 if is_alone else 1.0, enable_checkpointing=not is_alone, default_root_dir=out,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if settings.get("stream"):
        training = DataLoader(Stream(), batch_size=6)
    else:
        training = DataLoader(Texts(), batch_size=6, shuffle=True)
    trainer.fit(Module(), training, DataLoader(Texts(), batch_size=6))
