"""Trainers of Lightning's over a small module on ranks: what a job saw, stock or over a world that changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import lightning
import torch
import torchmetrics
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ds_dynatrain.adapters.groups.device import compute_device, is_accelerated
from ds_dynatrain.integrations.lightning import DynatrainStrategy, SwitchCallback

CONFIG: dict[str, Any] = {
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
EVALUATED = 36


class Stock(DeepSpeedStrategy):
    """Lightning's own, which wants GPUs, on what there is."""

    root_device = property(lambda self: torch.device(compute_device().type, 0))

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class SharedDevice(Accelerator):
    """That of DeepSpeed's accelerator, as Lightning wants to know it; all processes share it."""

    def setup_device(self, device: torch.device) -> None:
        """It is there."""

    def teardown(self) -> None:
        """It stays."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(compute_device().type, index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return compute_device().type


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A sum to be learnt."""

    def __init__(self, length: int) -> None:
        self.inputs = torch.randn(length, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        return x, x.sum(0, keepdim=True)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same without an index, in the orders in which Lightning shuffles epochs."""

    def __init__(self, length: int) -> None:
        self.points, self.epoch = Points(length), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(self.epoch)
        return (self.points[index] for index in torch.randperm(len(self.points), generator=drawn).tolist())


class Module(lightning.LightningModule):
    """A user's; schedule: the kind of its scheduler."""

    def __init__(self, schedule: str = "step", dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 17), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(17, 1)
        self.net = torch.nn.Sequential(*layers)
        self.mean = torchmetrics.MeanMetric()
        self.seen = list[tuple[float, int]]()
        self.hooks = list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x).float(), y.float())
        self.seen.append((float(loss), getattr(self.trainer.strategy, "samples", len(x))))
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x).float(), y.float())
        self.mean(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("metric", self.mean)

    test_step = validation_step

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        self.hooks.append(f"before {len(x)}")
        return x, y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x, y * 1.0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("zero")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.hooks.append("step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.hparams["schedule"] == "plateau":
            reducing = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            how = {"scheduler": reducing, "monitor": "val_loss", "interval": "step", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": how}
        if self.hparams["schedule"] == "none":
            return optimizer
        total = self.trainer.estimated_stepping_batches
        decaying = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decaying, "interval": self.hparams["schedule"]}}


class Late(Module):
    """Its layers are made where Lightning asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1))

    def on_fit_start(self) -> None:
        self.mean.to(self.trainer.strategy.root_device)  # in such a module neither Lightning nor DeepSpeed moves it


class Noting(Callback):
    """A row for each optimizer step and each evaluation."""

    def __init__(self) -> None:
        self.rows, self.steps = list[dict[str, Any]](), 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step <= self.steps:  # in the middle of accumulation
            return
        self.steps = trainer.global_step
        pair = torch.tensor([sum(loss * n for loss, n in pl_module.seen), sum(n for _, n in pl_module.seen)])
        pl_module.seen.clear()
        total, samples = trainer.strategy.reduce(pair.to(pl_module.device), reduce_op="sum").tolist()
        row = {"step": trainer.global_step, "epoch": trainer.current_epoch, "loss": total / samples}
        row["norm"] = float(trainer.model.get_global_grad_norm() or 0)  # stage 0 has none
        row["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.rows.append(row)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            value, metric = (float(trainer.callback_metrics[name]) for name in ("val_loss", "metric"))
            self.rows.append({"step": trainer.global_step, "val": value, "metric": metric})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        named = {"mean": "train_loss_epoch", "count": "count"}
        row = {name: float(trainer.callback_metrics[metric]) for name, metric in named.items()}
        self.rows.append({"step": trainer.global_step, **row})


def strategy_of(block: Mapping[str, Any] | None, stage: int = 1, **config: Any) -> Any:
    """Ours, or Lightning's own for `None`."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {**copy.deepcopy(CONFIG), **config}
    found["zero_optimization"]["stage"] = stage
    return Stock(config=found) if block is None else DynatrainStrategy(config={**found, "dynatrain": dict(block)})


def trainer_of(
    folder: Path, strategy: Any, callbacks: Sequence[Callback] = (), environment: Any = None, **named: Any
) -> Any:
    """A Trainer that is quiet."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    devices = torch.distributed.get_world_size()
    return lightning.Trainer(
        accelerator=SharedDevice() if is_accelerated() else "cpu", devices=devices, strategy=strategy,
        plugins=[TorchElasticEnvironment() if environment is None else environment],
        **{"default_root_dir": folder, "callbacks": list(callbacks), "enable_checkpointing": False, **quiet, **named},
    )  # fmt: skip


def run(
    folder: Path,
    block: Mapping[str, Any] | None,
    stage: int = 1,
    schedule: Mapping[int, Mapping[str, Any]] | None = None,
    samples: int = 72,
    batch: int = 3,
    save: int | None = None,
    resume: str | None = None,
    module: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    tests: bool = False,
    workers: int = 0,
    drop_last: bool = False,
    is_late: bool = False,
    monitors: bool = False,
    data: type[Any] = Points,
    **named: Any,
) -> dict[str, Any]:
    """A whole job. save: after each so many steps, into `folder`. resume: from this one in it. tests: after `fit`.

    is_late: layers are made in `configure_model`. monitors: by `val_loss` one checkpoint is kept, and training ends.
    """
    noting = Noting()
    listening: list[Callback] = [noting]
    if save is not None:
        name = ModelCheckpoint(
            folder, "{step}", every_n_train_steps=save, save_top_k=-1, save_last=True, auto_insert_metric_name=True
        )
        listening.append(name)
    if monitors:
        best = ModelCheckpoint(folder, "best-{step}", monitor="val_loss", save_top_k=1, auto_insert_metric_name=False)
        listening += [best, EarlyStopping("val_loss", stopping_threshold=8.7)]
    if schedule is not None:
        listening.append(SwitchCallback(schedule))
    strategy = strategy_of(block, stage, **(config or {}))
    trainer = trainer_of(folder, strategy, listening, enable_checkpointing=save is not None or monitors, **named)
    held = Late() if is_late else Module(**(module or {}))
    found: dict[str, Any] = {"rows": noting.rows}
    settings: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "drop_last": drop_last}
    training = DataLoader(data(samples), shuffle=data is Points, **settings)
    evaluating = DataLoader(Points(EVALUATED), batch_size=3)
    try:
        trainer.fit(held, training, evaluating, ckpt_path=None if resume is None else str(folder / resume))
        found["ranks"], found["batches"] = trainer.world_size, trainer.num_training_batches
        found["steps"], found["hooks"] = trainer.global_step, held.hooks
        found["weights"] = weights(held)
        if save is not None or monitors:
            found["best"] = Path(trainer.checkpoint_callback.best_model_path).name
        if tests:
            found["test"] = trainer.test(held, evaluating, verbose=False)[0]["val_loss"]
            first = str(folder / f"step={save}.ckpt")
            found["test of first"] = trainer.test(held, evaluating, first, verbose=False)[0]["val_loss"]
    except SystemExit as end:
        if end.code:
            raise
        found["let go"] = True
    finally:
        found["rank"] = trainer.global_rank
        with suppress(AttributeError):
            strategy.deepspeed_engine.destroy()
    return found


def weights(module: torch.nn.Module) -> torch.Tensor:
    """All of them, from wherever they are."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return torch.cat([each.detach().flatten().clone() for each in module.parameters()])
