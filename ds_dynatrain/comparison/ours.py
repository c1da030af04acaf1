"""Ranks of the ways that are ours: live, by a checkpoint in the living processes, by one and a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import deepspeed  # noqa: F401  (its import is to be in the phase of that name)
import torch

import ds_dynatrain
from ds_dynatrain.comparison.digests import of_deepspeed
from ds_dynatrain.comparison.job import BATCH, Side, Task
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.workload import Samples, config, model_of
from ds_dynatrain.report import SwitchEvent

TAG = "moved"
PHASES = {
    "meet": "drain",
    "drain": "drain",
    "digest": "proof",
    "save": "save",
    "free": "initialize",
    "restore": "load",
    "rebuild": "initialize",
    "move": "move",
    "carry": "initialize",
    "verify": "proof",
    "commit": "proof",
    "late": "move",
}
"""How the phases of a switch are called in the comparison."""
IN_STEP = ("late", "commit")
"""Those of a late switch for which the first step waits."""


class Trainer:
    """An engine in a layout, and the batches that it is given."""

    def __init__(self, task: Task, notes: Notes, side: Side) -> None:
        self.notes = notes
        settings = config(side.zero_stage)
        settings["dynatrain"] = {
            "layout": {"data": side.data, "zero_stage": side.zero_stage},
            "transport": task.transport,
            "late": task.late,
            "timeout_seconds": 120,
        }
        if task.safety == "lean":
            settings["dynatrain"] |= {"safety": "lean", "fallback": {"path": task.folder}}
        model = model_of(task.size)
        notes.write("model", parameters=sum(parameter.numel() for parameter in model.parameters()))
        self.engine, *_ = ds_dynatrain.initialize(model=model, config=settings)
        samples = Samples((task.before + task.after + 1) * BATCH)
        self._batches: Iterator[Any] = iter(self.engine.loader(samples, num_workers=0, shuffle=False))

    def step(self) -> bool:
        """One micro-batch, noted; False where none comes any more, because this member is idle until the end."""
        batch = self.next()
        if batch is None:
            return False
        self.train(batch)
        return True

    def next(self) -> Any:
        """The next batch; here a switch takes effect. None on a member that is idle until the others' scripts end."""
        try:
            return next(self._batches, None)
        except SystemExit as end:
            if end.code:
                raise
            return None

    def train(self, batch: Any) -> None:
        """A micro-batch that came already; a step where no gradients are accumulated."""
        tokens, numbers = batch
        number, begin = int(self.engine.global_steps) + 1, time.monotonic()
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        self.notes.write(
            "step",
            number=number,
            seconds=time.monotonic() - begin,
            loss=loss.item(),
            samples=numbers.tolist(),
        )

    def digest(self, when: str) -> None:
        """Note the digest of all state; a collective of the working members."""
        self.notes.write("digest", when=when, value=of_deepspeed(self.engine.module))


def run(task: Task, notes: Notes) -> None:
    """See `PROGRAMS` of `worker`."""
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    {"live": _live, "here": _here, "ours": _restarted}[task.program](task, notes)


def _live(task: Task, notes: Notes) -> None:
    trainer = Trainer(task, notes, task.change.source)
    engine, target = trainer.engine, task.change.target

    def note(event: SwitchEvent) -> None:
        notes.write(
            "switch",
            outcome=event.outcome,
            reason=event.reason,
            pause=event.pause_ms / 1e3,
            wait=event.late_wait_ms / 1e3,
            certificate=event.certificate_ms / 1e3,
            sent=event.bytes_sent,
        )
        for name, milliseconds in event.phases_ms.items():
            is_in_step = task.late and name in IN_STEP
            notes.write("part", name=PHASES.get(name, "rest"), seconds=milliseconds / 1e3, is_in_step=is_in_step)
        if task.late and event.outcome == "committed" and not engine.idle:
            with notes.apart():  # inside of the first step: masters and moments were not there before
                trainer.digest("after")

    engine.on_switch(note)
    was_idle = engine.idle
    while not was_idle and engine.global_steps < task.before:
        if engine.global_steps == task.before - task.lead:
            engine.switch(at=task.before, data=target.data, zero_stage=target.zero_stage)
        trainer.step()
    if not was_idle:
        trainer.digest("before")
    notes.begin()
    batch = trainer.next()
    if batch is None:
        notes.memory()
        return
    _go_on(task, trainer, batch)


def _here(task: Task, notes: Notes) -> None:
    """All processes live; those that are idle on one side wait meanwhile."""
    trainer = Trainer(task, notes, task.change.source)
    if trainer.engine.idle:
        notes.forget_memory()
        trainer.next()
    else:
        _to_the_change(task, trainer)
        notes.begin()
        with notes.phase("save"):
            trainer.engine.save(task.folder, TAG)
    with notes.phase("initialize"):
        trainer.engine.destroy()
        del trainer
        trainer = Trainer(task, notes, task.change.target)
    _load(task, trainer)


def _restarted(task: Task, notes: Notes) -> None:
    if task.part == "old":
        trainer = Trainer(task, notes, task.change.source)
        _to_the_change(task, trainer)
        notes.begin()
        with notes.phase("save"):
            trainer.engine.save(task.folder, TAG)
        notes.stamp("saved")
        notes.memory()
        return
    with notes.phase("initialize"):
        trainer = Trainer(task, notes, task.change.target)
    _load(task, trainer)


def _to_the_change(task: Task, trainer: Trainer) -> None:
    while trainer.engine.global_steps < task.before:
        trainer.step()
    trainer.digest("before")


def _load(task: Task, trainer: Trainer) -> None:
    """Load, and go on; a member that is idle afterwards waits for the end."""
    if trainer.engine.idle:
        trainer.next()
        return
    with trainer.notes.phase("load"):
        trainer.engine.load(task.folder, TAG)
    batch = trainer.next()
    _go_on(task, trainer, batch)


def _go_on(task: Task, trainer: Trainer, batch: Any) -> None:
    notes = trainer.notes
    notes.stamp("ready")
    notes.write("resumed", step=int(trainer.engine.global_steps))
    notes.memory()
    if not task.late:
        trainer.digest("after")
    resumed = trainer.engine.global_steps
    with notes.first_step():
        trainer.train(batch)
        while trainer.engine.global_steps == resumed and trainer.step():
            pass
    while trainer.engine.global_steps < task.before + task.after:
        trainer.step()
