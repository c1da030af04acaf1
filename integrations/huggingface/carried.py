"""State of a Trainer or an Accelerator that a member takes over when it starts to work, and that a checkpoint holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from ds_dynatrain.integrations.huggingface.schedules import restore_schedule, schedule_of

PROGRESS = "trainer"
"""Name under which the progress is registered with the engine."""
_OWN = ("is_local_process_zero", "is_world_process_zero")
"""Fields of `TrainerState` that are separate for each process."""

_OF_JOB = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "stateful_callbacks"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of `TrainerState` that are restored.

The other fields follow from the arguments, which may differ when a job continues, for example by having more steps.
"""


class TrainerProgress:
    """State of a Trainer that its checkpoints hold.

    It consists of `TrainerState`, the states of callbacks, the losses not logged yet, and any schedule that is not the
    engine's. When a member starts to work, everything on which a trainer bases decisions, such as the best checkpoint
    and the patience of early stopping, comes from rank 0.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._losses: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values. A scheduler's own state may also contain other values."""
        trainer = self._trainer
        state = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in _OWN}
        state["stateful_callbacks"] = callback_states(trainer)
        return {"state": state, "losses": _losses(trainer), "scheduler": schedule_of(trainer.lr_scheduler)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        trainer = self._trainer
        for name in _OF_JOB:
            setattr(trainer.state, name, state["state"][name])
        restore_callbacks(trainer, state["state"]["stateful_callbacks"])
        self._losses = state["losses"]
        if state["scheduler"] is not None:
            restore_schedule(trainer.lr_scheduler, trainer.optimizer, state["scheduler"])
        self.settle_losses()

    def settle_losses(self) -> None:
        """Restore the losses once more, because `train` sets them to 0 after its engine is made."""
        if self._losses is not None:
            self._trainer._tr_loss = torch.tensor(self._losses["since_log"], device=self._trainer.args.device)
            self._trainer._total_loss_scalar = self._losses["total"]
            self._trainer._globalstep_last_logged = self._losses["logged_at"]

    def forget_losses(self) -> None:
        """Drop the restored losses once they are in place. From now on, the trainer counts."""
        self._losses = None


def callback_states(trainer: Any) -> dict[str, Any]:
    """Return the current states of a trainer's callbacks and of its control, in the form of `TrainerState`."""
    listed = [each for each in (*trainer.callback_handler.callbacks, trainer.control) if _has_state(each)]
    found: dict[str, Any] = TrainerState(stateful_callbacks=listed).stateful_callbacks
    return found


def restore_callbacks(trainer: Any, states: dict[str, Any]) -> None:
    """Set the attributes in `states` on callbacks. Callbacks of one class are matched in order; their arguments stay.

    The control of the loop is left alone, because a step sets its flags anew.
    """
    rest = {name: list(held) if isinstance(held, list) else [held] for name, held in states.items()}
    for callback in filter(_has_state, trainer.callback_handler.callbacks):
        for held in rest.get(type(callback).__name__, [])[:1]:
            rest[type(callback).__name__].pop(0)
            for name, value in held.get("attributes", {}).items():
                setattr(callback, name, value)


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState)


def _losses(trainer: Any) -> dict[str, Any]:
    since = getattr(trainer, "_tr_loss", 0.0)
    return {
        "since_log": float(since),
        "total": float(getattr(trainer, "_total_loss_scalar", 0.0)),
        "logged_at": int(getattr(trainer, "_globalstep_last_logged", 0)),
    }


class Counts:
    """Counts that an Accelerator keeps by itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """Return the number of passes in `accumulate`, and the number of checkpoints."""
        accelerator = self._accelerator
        return {"step": accelerator.step, "iteration": accelerator.project_configuration.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore counts that `state_dict` returned."""
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"]
