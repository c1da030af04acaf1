"""Callback for users, which asks for switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.integrations.lightning.strategy import DynatrainStrategy


class SwitchCallback(Callback):
    """Callback that asks for layouts at given optimizer steps of the job: `SwitchCallback({1000: {"data": 4}})`.

    schedule: the arguments of `engine.switch`, by the number of steps. SwitchRefused is raised by `trainer.fit()`, on
    all processes alike.
    """

    def __init__(self, schedule: Mapping[int, Mapping[str, Any]]) -> None:
        self.schedule = {int(step): dict(sizes) for step, sizes in schedule.items()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Ask for the layout of step 0, or of the step from which the job goes on."""
        self._ask(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ask for the layout of this step; it takes effect before the next one, after this step's validation and
        save."""
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
