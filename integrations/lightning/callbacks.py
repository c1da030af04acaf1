"""Callback with which users request switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.integrations.lightning.strategy import DynatrainStrategy


class SwitchCallback(Callback):
    """Callback that requests layouts at given optimizer steps of the job: `SwitchCallback({1000: {"data": 4}})`.

    schedule: a map from a number of steps to the arguments of `engine.switch`.

    SwitchRefused is raised by `trainer.fit()`, on all processes alike.
    """

    def __init__(self, schedule: Mapping[int, Mapping[str, Any]]) -> None:
        self.schedule = {int(step): dict(sizes) for step, sizes in schedule.items()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Request the layout scheduled for step 0, or for the step from which the job continues."""
        self._ask(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Request the layout scheduled for this step, if any.

        It takes effect before the next step, after this step's validation and save.
        """
        self._ask(trainer)

    def _ask(self, trainer: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, DynatrainStrategy):
            raise ConfigError(
                f"SwitchCallback: the trainer has a {type(strategy).__name__}, which cannot switch; give it "
                'strategy="dynatrain" or a DynatrainStrategy'
            )
        sizes = self.schedule.get(trainer.global_step)
        if sizes is not None and not strategy.engine.idle:
            strategy.engine.switch(at=trainer.global_step, **sizes)
