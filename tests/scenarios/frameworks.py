"""Training loops of other libraries, which ask for switches by their callbacks: Trainer of Hugging Face, Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import ds_dynatrain
from tests.scenarios.actions import Seen
from tests.scenarios.models import MODELS, SAMPLES, Texts, build
from tests.scenarios.row import Run

BATCH = 12


def play_trainer(run: Run, config: dict[str, Any], folder: Path, seen: Seen) -> None:
    """Train under Trainer of Hugging Face; without a `dynatrain` block it is the stock one."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    from ds_dynatrain.integrations.transformers import SwitchCallback, elastic

    os.environ["ACCELERATE_USE_CPU"] = "false"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # else each rank is alone
    config |= {"train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": True}
    del config["optimizer"]
    is_elastic = "dynatrain" in config
    arguments = TrainingArguments(
        output_dir=str(folder), deepspeed=config, per_device_train_batch_size=3, max_steps=run.steps, logging_steps=1,
        learning_rate=2e-3, seed=0, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    schedule = {event.at: dict(event.given) for event in run.events}
    trainer: Any = (elastic(Trainer) if is_elastic else Trainer)(
        model=build(run.model),
        args=arguments,
        train_dataset=Named(),
        callbacks=[SwitchCallback(schedule)] if schedule else [],
    )
    engine: Any = None
    try:
        trainer.train()
        engine = trainer.deepspeed
        seen.worked_last = True
    finally:
        engine = engine or trainer.deepspeed
        note_last(engine, seen)
        for row in trainer.state.log_history if arguments.process_index == 0 else ():
            if "loss" in row:
                seen.losses[row["step"] - 1] = [(0, 0, row["loss"], BATCH)]
        if is_elastic:
            engine.destroy()


class Named(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The texts as keyword arguments of a model of transformers."""

    def __init__(self) -> None:
        self.inputs = Texts().inputs

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.inputs[index]}


def play_lightning(run: Run, config: dict[str, Any], folder: Path, seen: Seen) -> None:
    """Train under Lightning's Trainer, which shuffles the samples of the first epoch as DeepSpeed does."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from ds_dynatrain.integrations.lightning import DynatrainStrategy, SwitchCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(run.model)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = MODELS[run.model].loss(self.model, *batch[1:])
            engine, samples = self.trainer.strategy.engine, self.trainer.strategy.samples
            seen.note(engine, engine.global_steps, loss, batch[0][:samples])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    schedule = {event.at: dict(event.given) for event in run.events}
    for key in ("optimizer", "train_micro_batch_size_per_gpu", "gradient_clipping"):
        del config[key]
    strategy = DynatrainStrategy(config=config)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_steps=run.steps, gradient_clip_val=1.0,
        plugins=[TorchElasticEnvironment()], callbacks=[SwitchCallback(schedule)], default_root_dir=folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(Texts(), batch_size=3))
        seen.worked_last = not strategy.engine.idle
    finally:
        note_last(strategy.engine, seen)
        strategy.engine.destroy()


def note_last(engine: Any, seen: Seen) -> None:
    """Keep what became of the last switch, and the last layout."""
    event: ds_dynatrain.SwitchEvent | None = getattr(engine, "last_switch", None)
    seen.layout = str(getattr(engine, "layout", ""))
    if event is not None:
        seen.switches.append({"outcome": event.outcome, "phases": sorted(event.phases_ms), "reason": event.reason})


FRAMEWORKS = {"trainer": play_trainer, "stock trainer": play_trainer, "lightning": play_lightning}
"""By the names that runs have for them as their loops."""
