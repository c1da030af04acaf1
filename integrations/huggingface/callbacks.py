"""Callbacks: one that keeps a Trainer's counts equal to the engine's, and one with which users request switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_dynatrain.errors import ConfigError


class SwitchCallback(TrainerCallback):
    """Callback that requests layouts at given optimizer steps of the job: `SwitchCallback({1000: {"data": 4}})`.

    schedule: a map from a number of steps to the arguments of `engine.switch`.

    SwitchRefused is raised by `trainer.train()`, on all processes alike.
    """

    def __init__(self, schedule: Mapping[int, Mapping[str, Any]]) -> None:
        self.schedule = {int(step): dict(sizes) for step, sizes in schedule.items()}
        self.engine: Any = None
        """The engine, set by the trainer."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Request the layout scheduled for step 0, or for the step from which the job continues."""
        self._ask(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Request the layout scheduled for this step, if any. It takes effect before the next step."""
        self._ask(state)

    def _ask(self, state: TrainerState) -> None:
        if self.engine is None:
            raise ConfigError(
                "SwitchCallback: give it to a trainer of `elastic(...)`, which has an engine that can switch"
            )
        sizes = self.schedule.get(state.global_step)
        if sizes is not None and not self.engine.idle:
            self.engine.switch(at=state.global_step, **sizes)


class Following(TrainerCallback):
    """Callback that runs before all others, and corrects the values that they read."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Restore the losses, which `train` has just set to 0."""
        self._trainer.progress.settle_losses()
        self._trainer.progress.forget_losses()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Set the Trainer's steps and epochs to those of the job.

        They may differ because a new member starts in the middle, and because a discarded global batch is not a step.
        """
        trainer = self._trainer
        trainer.end_window()
        state.global_step = int(trainer.deepspeed.global_steps)
        state.epoch = trainer.global_batches.epoch_after(state.global_step, state.max_steps)
