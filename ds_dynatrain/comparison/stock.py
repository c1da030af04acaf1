"""Ranks of plain DeepSpeed: a job saves DeepSpeed's own checkpoint, and a new job loads its universal form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as td
from torch import Tensor

from ds_dynatrain.comparison import workload
from ds_dynatrain.comparison.job import MOMENTS, SAVED, UNIVERSAL, Task
from ds_dynatrain.comparison.notes import Notes


class DeepSpeedTrainer(workload.Trainer):
    """Base class of trainers with a DeepSpeed engine, either a stock engine or one of this package."""

    engine: Any

    @property
    def done(self) -> int:  # type: ignore[override]
        """Number of optimizer steps taken."""
        return int(self.engine.global_steps)

    def train(self, tokens: Tensor) -> Tensor:
        """Train a micro-batch, which is a whole step without gradient accumulation. Return the loss."""
        loss: Tensor = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def state(self) -> Iterator[Tensor]:
        """Yield every master and moment as a whole tensor, using DeepSpeed's own functions."""
        for parameter in self.engine.module.parameters():
            yield deepspeed.utils.safe_get_full_fp32_param(parameter)
            for name in MOMENTS:
                yield deepspeed.utils.safe_get_full_optimizer_state(parameter, name)


class StockTrainer(DeepSpeedTrainer):
    """A trainer with an engine of stock DeepSpeed."""

    def __init__(self, task: Task, notes: Notes) -> None:
        super().__init__(task, notes)
        is_new = task.part == "new"
        side = task.change.target if is_new else task.change.source
        settings = workload.config(side.zero_stage) | {"checkpoint": {"load_universal": is_new}}
        deepspeed.init_distributed(verbose=False)
        model = self.model_made()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def save(self) -> None:
        """Save DeepSpeed's own checkpoint, and wait until all ranks have saved theirs."""
        self.engine.save_checkpoint(str(Path(self.task.folder) / SAVED), tag="step")
        td.barrier()

    def load(self) -> None:
        """Load the universal checkpoint that the converter made."""
        self.engine.load_checkpoint(self.task.folder, tag=UNIVERSAL)


def run(task: Task, notes: Notes) -> None:
    """Run the job before or after the restart, as the task says."""
    workload.restarted(task, notes, StockTrainer)
    td.destroy_process_group()
