"""Callbacks: one that keeps a Trainer's counts at the engine's, and one that users give, which asks for switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_dynatrain.errors import ConfigError


class SwitchCallback(TrainerCallback):
    """Ask for a layout after so many optimizer steps of the job: `SwitchCallback({1000: {"data": 4}})`.

    schedule: by the number of steps, the arguments of `engine.switch`. SwitchRefused comes out of `trainer.train()`, on
    all processes alike.
    """

    def __init__(self, schedule: Mapping[int, Mapping[str, Any]]) -> None:
        self.schedule = {int(step): dict(sizes) for step, sizes in schedule.items()}
        self.engine: Any = None
        """Set by the trainer."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Those of step 0, or of the step that it goes on from."""
        self._ask(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Those of this step; they take effect before the next one."""
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
    """Stands before all others, and puts what they read right."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """`train` has set the losses to 0 just now."""
        self._trainer.progress.settle_losses()
        self._trainer.progress.forget_losses()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """The job's steps and epochs: a newcomer is in the middle, and a global batch that was discarded is no step."""
        trainer = self._trainer
        trainer.end_window()
        state.global_step = int(trainer.deepspeed.global_steps)
        epoch, step = divmod(state.global_step, len(trainer.global_batches))
        state.epoch = epoch + step / len(trainer.global_batches)
