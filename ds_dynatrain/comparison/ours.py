"""Ranks that run our ways: live, by a checkpoint in the living processes, and by a checkpoint and a restart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ds_dynatrain
from ds_dynatrain.comparison.job import Side, Task
from ds_dynatrain.comparison.notes import Notes
from ds_dynatrain.comparison.stock import DeepSpeedTrainer
from ds_dynatrain.comparison.workload import config, restarted
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
"""Names of a switch's phases in the comparison."""
IN_STEP = ("late", "commit")
"""Phases of a late switch for which the first step waits."""


class Trainer(DeepSpeedTrainer):
    """An engine in a layout, and the loader of its batches."""

    def __init__(self, task: Task, notes: Notes, side: Side) -> None:
        super().__init__(task, notes)
        settings = config(side.zero_stage)
        settings["dynatrain"] = {
            "layout": {"data": side.data, "zero_stage": side.zero_stage},
            "transport": task.transport,
            "late": task.late,
            "timeout_seconds": 120,
        }
        if task.safety == "lean":
            settings["dynatrain"] |= {"safety": "lean", "fallback": {"path": task.folder}}
        self.engine, *_ = ds_dynatrain.initialize(model=self.model_made(), config=settings)
        self._batches: Iterator[Any] = iter(self.engine.loader(self.samples, num_workers=0, shuffle=False))

    def step(self) -> bool:
        """Train a micro-batch; return False if there is none, because this member is idle until the end."""
        batch = self.next()
        if batch is not None:
            self.train_batch(batch)
        return batch is not None

    def next(self) -> Any:
        """Return the next batch; a switch takes effect here. None on a member that is idle until the scripts end."""
        try:
            return next(self._batches, None)
        except SystemExit as end:
            if end.code:
                raise
            return None

    def train_batch(self, batch: Any) -> None:
        """Train a micro-batch that `next` has returned."""
        self.noted(batch[0], batch[1].tolist())

    def save(self) -> None:
        """Save all state into the folder of the task."""
        self.engine.save(self.task.folder, TAG)

    def load(self) -> None:
        """Load the saved state, in any layout."""
        self.engine.load(self.task.folder, TAG)


def run(task: Task, notes: Notes) -> None:
    """Run the program that the task names."""
    if task.program == "ours":
        side = task.change.source if task.part == "old" else task.change.target
        restarted(task, notes, partial(Trainer, side=side))
    else:
        {"live": _live, "here": _here}[task.program](task, notes)


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
            with notes.apart():  # inside the first step: masters and moments arrive only then
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
    """Run "here": all processes stay alive, and those that are idle on one side of the change wait."""
    trainer = Trainer(task, notes, task.change.source)
    if trainer.engine.idle:
        notes.forget_memory()
        trainer.next()
    else:
        while trainer.done < task.before:
            trainer.step()
        trainer.digest("before")
        notes.begin()
        with notes.phase("save"):
            trainer.save()
    with notes.phase("initialize"):
        trainer.engine.destroy()
        del trainer
        trainer = Trainer(task, notes, task.change.target)
    if trainer.engine.idle:
        trainer.next()
        return
    with notes.phase("load"):
        trainer.load()
    _go_on(task, trainer, trainer.next())


def _go_on(task: Task, trainer: Trainer, batch: Any) -> None:
    notes = trainer.notes
    notes.stamp("ready")
    notes.write("resumed", step=trainer.done)
    notes.memory()
    if not task.late:
        trainer.digest("after")
    resumed = trainer.done
    with notes.first_step():
        trainer.train_batch(batch)
        while trainer.done == resumed and trainer.step():
            pass
    while trainer.done < task.before + task.after:
        trainer.step()
