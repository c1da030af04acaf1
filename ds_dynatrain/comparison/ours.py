"""Ranks with this package's engine, which change the layout live, or by a checkpoint with or without a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import ds_dynatrain
from ds_dynatrain.comparison.job import BEFORE, LEAD, ComparedLayout, Task
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.stock import DeepSpeedTrainer
from ds_dynatrain.comparison.workload import config, go_on, restarted
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
"""A map from each phase of a switch to the comparison's phase to which its time is added."""
IN_STEP = ("late", "commit")
"""Phases for which the first step waits after a switch that moves some state after the pause."""


class DynatrainTrainer(DeepSpeedTrainer):
    """A trainer with an engine of this package and a loader for its batches.

    side: the initial layout.
    """

    def __init__(self, task: Task, notes: Notes, side: ComparedLayout) -> None:
        super().__init__(task, notes)
        settings = config(side.zero_stage)
        settings["dynatrain"] = {
            "layout": {"data": side.data, "zero_stage": side.zero_stage},
            "timeout_seconds": 120,
            **task.way.block,
        }
        if "safety" in task.way.block:  # a lean switch needs a folder for its checkpoint
            settings["dynatrain"]["fallback"] = {"path": task.folder}
        self.engine, *_ = ds_dynatrain.initialize(model=self.model_made(), config=settings)
        self._batches: Iterator[Any] = iter(self.engine.loader(self.samples, num_workers=0, shuffle=False))

    def step(self) -> bool:
        """Train one micro-batch. Return False if there is none because this member stays idle until the end."""
        batch = self.next()
        return batch is not None and self.train_batch(batch)

    def next(self) -> Any:
        """Return the next micro-batch, or None on a member that stays idle until the end.

        A requested switch takes effect during this call.
        """
        try:
            return next(self._batches, None)
        except SystemExit as end:
            if end.code:
                raise
            return None

    def train_batch(self, batch: Any) -> bool:
        """Train a micro-batch returned by `next`, including the optimizer's step. Return True, as `step` does."""
        self.noted(batch[0], batch[1].tolist())
        return True

    def save(self) -> None:
        """Save all state to the task's folder."""
        self.engine.save(self.task.folder, TAG)

    def load(self) -> None:
        """Load the state that `save` wrote. The layout may differ."""
        self.engine.load(self.task.folder, TAG)


def run(task: Task, notes: Notes) -> None:
    """Run the task, carrying out the change in the way that the task names."""
    if task.way.is_restarted:
        side = task.change.source if task.part == "old" else task.change.target
        restarted(task, notes, partial(DynatrainTrainer, side=side))
    else:
        (_here if task.way.name == "here" else _live)(task, notes)


def _live(task: Task, notes: Notes) -> None:
    trainer = DynatrainTrainer(task, notes, task.change.source)
    engine, target = trainer.engine, task.change.target

    def note(event: SwitchEvent) -> None:
        notes.switch = event
        for name, milliseconds in event.phases_ms.items():
            phase = PHASES.get(name, "rest")
            notes.phases[phase] = notes.phases.get(phase, 0.0) + milliseconds / 1e3
            notes.waited += milliseconds / 1e3 if task.way.is_late and name in IN_STEP else 0.0
        if task.way.is_late and event.outcome == "committed" and not engine.idle:
            begin = time.monotonic()  # masters and moments arrive only during the first step
            trainer.digest("after")
            notes.apart += time.monotonic() - begin

    engine.on_switch(note)
    was_idle = engine.idle
    while not was_idle and engine.global_steps < BEFORE:
        if engine.global_steps == BEFORE - LEAD:
            engine.switch(at=BEFORE, data=target.data, zero_stage=target.zero_stage)
        trainer.step()
    if not was_idle:
        trainer.digest("before")
    notes.begin()
    batch = trainer.next()
    if batch is None:
        notes.memory()
        return
    go_on(trainer, partial(trainer.train_batch, batch))


def _here(task: Task, notes: Notes) -> None:
    """Carry out the change by a checkpoint that the same processes save, and load into a new engine.

    Processes that are idle before or after the change wait.
    """
    trainer = DynatrainTrainer(task, notes, task.change.source)
    if trainer.engine.idle:
        notes.forget_memory()
        trainer.next()
    else:
        while trainer.done < BEFORE:
            trainer.step()
        trainer.digest("before")
        notes.begin()
        with notes.phase("save"):
            trainer.save()
    with notes.phase("initialize"):
        trainer.engine.destroy()
        del trainer
        trainer = DynatrainTrainer(task, notes, task.change.target)
    if trainer.engine.idle:
        trainer.next()
        return
    with notes.phase("load"):
        trainer.load()
    go_on(trainer, partial(trainer.train_batch, trainer.next()))
