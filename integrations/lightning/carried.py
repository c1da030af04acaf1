"""State of a Trainer that a process takes over when it begins to work, and that a checkpoint holds.

It consists of plain values and tensors.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import lightning.pytorch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call

from ds_dynatrain.errors import CheckpointError

PROGRESS = "lightning"
"""Name under which the progress is registered with the engine."""
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class TrainerProgress:
    """Counts of the loops, states of callbacks, learning-rate schedules, and the newest logged metrics.

    saving: Lightning's own checkpoint, while one is being saved.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.saving: dict[str, Any] | None = None
        self._is_loading, self._loaded = False, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors. States of callbacks and schedulers may contain other values."""
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},
            "should_stop": bool(trainer.should_stop),
            "checkpoint": self.saving,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state in the middle of the loops. While a checkpoint is loaded, keep it for Lightning instead."""
        if self._is_loading:
            self._loaded = state
            return
        trainer = self._trainer
        _take(trainer.fit_loop, state["loops"])
        if trainer.fit_loop._data_fetcher is not None:  # it counts the batches fetched in an epoch
            trainer.fit_loop._data_fetcher.fetched = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        trainer.fit_loop.epoch_loop._results.reset()  # drop results of an epoch in which this process worked before
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        for config, held in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(held)
        for name, held in state["metrics"].items():
            setattr(trainer._logger_connector, name, move_data_to_device(held, trainer.strategy.root_device))
        trainer.should_stop = state["should_stop"]

    def settle(self, steps: int, batches: int, is_last: bool) -> None:
        """Set the counts of the loops to those before a global batch, which may be one that is trained again.

        steps: number of optimizer steps of the job.
        batches: number of batches of this epoch before the global batch.
        is_last: whether the global batch is the last one of the epoch.
        """
        loop = self._trainer.fit_loop
        progress, optimizer = loop.epoch_loop.batch_progress, loop.epoch_loop.automatic_optimization.optim_progress
        _advance(progress, batches - progress.current.completed)
        _advance(optimizer.optimizer.step, steps - optimizer.optimizer_steps)
        loop._data_fetcher.fetched = batches
        if is_last:
            loop._data_fetcher.length = batches + 1

    def loaded(self, load: Any) -> dict[str, Any]:
        """Return the state that Lightning has to restore from the checkpoint that `load` reads.

        A checkpoint saved on SIGTERM does not contain a checkpoint of Lightning, which is put together from the parts.
        Raises CheckpointError if the checkpoint belongs to another framework's job.
        """
        self._is_loading = True
        try:
            load()
        finally:
            self._is_loading = False
        state, self._loaded = self._loaded, {}
        if not state:
            raise CheckpointError(
                "the checkpoint is not of a Lightning job: it has no counts of its loops; take its weights alone "
                "(ds-dynatrain checkpoint convert)"
            )
        if state.get("checkpoint") is not None:
            found: dict[str, Any] = state["checkpoint"]
            return found
        return {
            "pytorch-lightning_version": lightning.pytorch.__version__,
            "loops": {"fit_loop": state["loops"]},
            "callbacks": state["callbacks"],
            "lr_schedulers": state["lr_schedulers"],
        }


def _advance(progress: Any, change: int) -> None:
    """Add a number to the counts of what is complete, and set all other counts to the same."""
    for tracker in (progress.total, progress.current):
        number = tracker.completed + change
        for each in fields(tracker):
            setattr(tracker, each.name, number)


def _take(loop: Any, state: dict[str, Any], prefix: str = "") -> None:
    """Set the counts of a loop and of its inner loops, without the restart that Lightning does from a checkpoint."""
    loop._load_from_state_dict(state, prefix)
    for name, held in vars(loop).items():
        if isinstance(held, _Loop):
            _take(held, state, f"{prefix}{name}.")
