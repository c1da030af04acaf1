"""Ranks of plain DeepSpeed: a job saves DeepSpeed's own checkpoint, and a new job loads its universal form."""

from __future__ import annotations

import resource
import subprocess
import sys
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
    """Run the job before or after the restart, or DeepSpeed's converter in between, as the task says."""
    if task.part == "convert":
        convert(Path(task.folder), notes)
        return
    workload.restarted(task, notes, StockTrainer)
    td.destroy_process_group()


def convert(folder: Path, notes: Notes) -> None:
    """Run DeepSpeed's converter to its universal format. Raises RuntimeError with its last error line if it fails.

    `--inject_missing_state` is needed because a plain model's checkpoint lacks entries that the converter requires.
    """
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(folder / SAVED / "step"), "--output_folder", str(folder / UNIVERSAL)]
    with notes.phase("convert"):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    notes.peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
