"""Ranks of plain DeepSpeed: its own checkpoint, which is converted to its universal format and loaded by a new job."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as td

from ds_dynatrain.comparison.digests import of_deepspeed
from ds_dynatrain.comparison.job import BATCH, SAVED, UNIVERSAL, Side, Task
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.workload import Samples, config, model_of, share


class Trainer:
    """A DeepSpeed engine, and the batches that it is given by the number of the step."""

    def __init__(self, task: Task, notes: Notes, side: Side, loads: bool) -> None:
        self.notes = notes
        settings = config(side.zero_stage) | {"checkpoint": {"load_universal": loads}}
        deepspeed.init_distributed(verbose=False)
        model = model_of(task.size)
        notes.write("model", parameters=sum(parameter.numel() for parameter in model.parameters()))
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        self._samples = Samples((task.before + task.after + 1) * BATCH)

    def step(self) -> None:
        """One step, noted."""
        tokens, numbers = share(self._samples, int(self.engine.global_steps), td.get_rank(), td.get_world_size())
        begin = time.monotonic()
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        self.notes.write(
            "step",
            number=int(self.engine.global_steps),
            seconds=time.monotonic() - begin,
            loss=loss.item(),
            samples=numbers,
        )

    def digest(self, when: str) -> None:
        """Note the digest of all state; a collective."""
        self.notes.write("digest", when=when, value=of_deepspeed(self.engine.module))


def run(task: Task, notes: Notes) -> None:
    """The old job or the new one."""
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    (_old if task.part == "old" else _new)(task, notes)
    td.destroy_process_group()


def _old(task: Task, notes: Notes) -> None:
    trainer = Trainer(task, notes, task.change.source, loads=False)
    for _ in range(task.before):
        trainer.step()
    trainer.digest("before")
    notes.begin()
    with notes.phase("save"):
        trainer.engine.save_checkpoint(str(Path(task.folder) / SAVED), tag="step")
        td.barrier()
    notes.stamp("saved")
    notes.memory()


def _new(task: Task, notes: Notes) -> None:
    with notes.phase("initialize"):
        trainer = Trainer(task, notes, task.change.target, loads=True)
    with notes.phase("load"):
        trainer.engine.load_checkpoint(task.folder, tag=UNIVERSAL)
    notes.stamp("ready")
    notes.write("resumed", step=int(trainer.engine.global_steps))
    notes.memory()
    trainer.digest("after")
    with notes.first_step():
        trainer.step()
    for _ in range(task.after - 1):
        trainer.step()
