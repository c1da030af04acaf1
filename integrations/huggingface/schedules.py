"""Learning-rate schedules that are not the engine's: carried to new members, and steady in a world that changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

if TYPE_CHECKING:
    from typing import Any as AcceleratedScheduler
else:
    from accelerate.scheduler import AcceleratedScheduler


def schedule_of(scheduler: Any) -> dict[str, Any] | None:
    """Return the state of a schedule; None if the schedule is the engine's, which carries its own state."""
    if scheduler is None or isinstance(scheduler, DeepSpeedSchedulerWrapper):
        return None
    state: dict[str, Any] = scheduler.state_dict()
    return {name: value for name, value in state.items() if name != "lr_lambdas"}


def restore_schedule(scheduler: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Restore a state that `schedule_of` returned, with the last learning rates."""
    lambdas = [None] * len(getattr(scheduler, "lr_lambdas", ()))
    scheduler.load_state_dict({**state, **({"lr_lambdas": lambdas} if lambdas else {})})
    for group, rate in zip(optimizer.param_groups, state.get("_last_lr", ()), strict=False):
        group["lr"] = rate


class SteadyScheduler(AcceleratedScheduler):
    """A schedule of Accelerate, stepped for a fixed number of processes instead of the current number.

    The schedule thus means the same in every world.

    stock: the schedule that Accelerate has made.
    processes: the number of processes for which one DataLoader batch each makes a global batch.
    engine: the ds_dynatrain engine.
    """

    def __init__(self, stock: AcceleratedScheduler, processes: int, engine: Any) -> None:
        super().__init__(stock.scheduler, stock.optimizers, stock.step_with_optimizer, stock.split_batches)
        self._processes, self._engine = processes, engine

    def step(self, *arguments: Any, **named: Any) -> None:
        """Step the schedule after an optimizer step, unless that step was skipped or discarded."""
        if self._engine.is_discarded:
            return
        if not self.step_with_optimizer:
            self.scheduler.step(*arguments, **named)
            return
        if not self.gradient_state.sync_gradients or any(each.step_was_skipped for each in self.optimizers):
            return
        for _ in range(self._processes):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):  # as in Accelerate
                self.scheduler.step(*arguments, **named)


class CarriedSchedule:
    """A `SteadyScheduler` in the form in which the engine carries objects."""

    def __init__(self, steady: SteadyScheduler) -> None:
        self._scheduler = steady.scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values. The scheduler's own state may also contain other values."""
        return schedule_of(self._scheduler) or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        restore_schedule(self._scheduler, self._scheduler.optimizer, state)
