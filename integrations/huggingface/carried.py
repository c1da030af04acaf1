"""What a member that starts to work takes over from the others, and a checkpoint holds, of a Trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

PROGRESS = "trainer"
"""Its name among the engine's objects."""
_OWN = ("is_local_process_zero", "is_world_process_zero")
"""Of `TrainerState`, what is each process's own."""

_OF_JOB = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "stateful_callbacks"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""What goes on; all else follows from the arguments, which may be others where a job goes on, such as more steps."""


class TrainerProgress:
    """`TrainerState`, the losses that are not logged yet, and a schedule that is not the engine's, as plain values."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._losses: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values, but for what a scheduler says of itself."""
        trainer = self._trainer
        state = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in _OWN}
        return {"state": state, "losses": _losses(trainer), "scheduler": schedule_of(trainer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        trainer = self._trainer
        for name in _OF_JOB:
            setattr(trainer.state, name, state["state"][name])
        self._losses = state["losses"]
        if state["scheduler"] is not None:
            restore_schedule(trainer, state["scheduler"])
        self.settle_losses()

    def settle_losses(self) -> None:
        """Put the losses in place once more: `train` sets them to 0 after its engine is made."""
        if self._losses is not None:
            self._trainer._tr_loss = torch.tensor(self._losses["since_log"], device=self._trainer.args.device)
            self._trainer._total_loss_scalar = self._losses["total"]
            self._trainer._globalstep_last_logged = self._losses["logged_at"]

    def forget_losses(self) -> None:
        """They are in place: from now on the trainer counts."""
        self._losses = None


def _losses(trainer: Any) -> dict[str, Any]:
    since = getattr(trainer, "_tr_loss", 0.0)
    return {
        "since_log": float(since),
        "total": float(getattr(trainer, "_total_loss_scalar", 0.0)),
        "logged_at": int(getattr(trainer, "_globalstep_last_logged", 0)),
    }


def schedule_of(trainer: Any) -> dict[str, Any] | None:
    """The state of a schedule that transformers has made; None where it is the engine's, which carries its own."""
    scheduler = trainer.lr_scheduler
    if scheduler is None or isinstance(scheduler, DeepSpeedSchedulerWrapper):
        return None
    state: dict[str, Any] = scheduler.state_dict()
    return {name: value for name, value in state.items() if name != "lr_lambdas"}


def restore_schedule(trainer: Any, state: dict[str, Any]) -> None:
    """The inverse, with the learning rates that it gave last."""
    scheduler, optimizer = trainer.lr_scheduler, trainer.optimizer
    lambdas = [None] * len(getattr(scheduler, "lr_lambdas", ()))
    scheduler.load_state_dict({**state, **({"lr_lambdas": lambdas} if lambdas else {})})
    for group, rate in zip(optimizer.param_groups, state.get("_last_lr", ()), strict=False):
        group["lr"] = rate
