"""Accelerate over a world that changes: an `Accelerator` for unchanged loops.

    from ds_dynatrain.integrations.accelerate import Accelerator  # instead of accelerate's

Import it before an Accelerator is made. In a launch whose nodes may join and leave, an Accelerator would otherwise look
for a world of fixed size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accelerate.accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.engine.changes import Change
from ds_dynatrain.errors import DataError, UnsupportedError
from ds_dynatrain.integrations.huggingface import accelerators, names, numbers
from ds_dynatrain.integrations.huggingface.calls import install
from ds_dynatrain.integrations.huggingface.carried import Counts
from ds_dynatrain.integrations.huggingface.collectives import Collectives
from ds_dynatrain.integrations.huggingface.loaders import EvaluationBatches, TrainingBatches, is_in_order
from ds_dynatrain.integrations.huggingface.schedules import CarriedSchedule, SteadyScheduler
from ds_dynatrain.integrations.huggingface.states import Checkpoints
from ds_dynatrain.integrations.shared.names import check

__all__ = ["Accelerator"]

check(names.ACCELERATE, "accelerate", "transformers")
check(names.LOOPS, "accelerate", "transformers")
install()

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = accelerate.Accelerator

EVALUATES = "accelerator.prepare_data_loader(loader, evaluation=True)"


class Accelerator(Collectives, Checkpoints, Below):
    """An `accelerate.Accelerator` for a DeepSpeed configuration with a `dynatrain` block.

    The DataLoader that shuffles is used for training, or the first one if none does. The others evaluate.

    Raises ConfigError without a block, and UnsupportedError, naming the feature, for features that cannot follow the
    world.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._training: TrainingBatches | None = None
        self._evaluations = 0
        self._processes = 1
        self._tracked: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        super().__init__(*arguments, **named)
        accelerators.refuse_given(self)

    @property
    def engine(self) -> Any:
        """The ds_dynatrain engine that `prepare` makes; None before that call."""
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        return None if wrapped is None else wrapped.engine

    @property
    def num_processes(self) -> int:
        """Number of processes in the current world or, before the model is prepared, in the first world."""
        found: int = super().num_processes
        if self.engine is not None or worker_place() is not None:
            return found
        return accelerators.layout_of(self).get("data") or found

    # ---- what is prepared --------------------------------------------------------------------------------------------

    def _prepare_deepspeed(self, *given: Any) -> tuple[Any, ...]:
        """Make the engine the way Accelerate does, with loaders and schedules that follow it."""
        accelerators.refuse_parts(given, self.engine is not None)
        loaders = [each for each in given if isinstance(each, DataLoader)]
        shuffling = [each for each in loaders if not is_in_order(each)] or loaders
        prepared = tuple(
            self.prepare_data_loader(each, evaluation=self._evaluates(each, shuffling[:1])) if each in loaders else each
            for each in given
        )
        if not any(isinstance(each, nn.Module) for each in given):
            return prepared
        training = self._training
        worth = accelerators.settle_sizes(self, None if training is None else training.batch_size)
        if self.step_scheduler_with_optimizer and any(isinstance(each, LRScheduler) for each in given):
            self._processes = accelerators.whole(worth)
        made = super()._prepare_deepspeed(*prepared)
        stock = [each for each in made if type(each) is AcceleratedScheduler]
        steady = {id(each): SteadyScheduler(each, self._processes, self.engine) for each in stock}
        self._schedulers[:] = [steady.get(id(each), each) for each in self._schedulers]
        self._begin(list(steady.values()))
        return tuple(steady.get(id(each), each) for each in made)

    def _evaluates(self, loader: DataLoader[Any], first: list[DataLoader[Any]]) -> bool:
        """Return whether a loader evaluates.

        first: the loader that trains if none does yet.
        """
        return is_in_order(loader) and (self._training is not None or loader not in first)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: Any = None,
        slice_fn_for_dispatch: Any = None,
        *,
        evaluation: bool | None = None,
    ) -> Any:
        """Prepare a DataLoader the way Accelerate does.

        evaluation: whether the DataLoader evaluates; guessed if not given.

        Raises UnsupportedError for a second DataLoader that trains, and DataError if the samples of the DataLoader
        cannot be divided among a different number of ranks.
        """
        if isinstance(data_loader, (TrainingBatches, EvaluationBatches)):
            return data_loader
        if evaluation if evaluation is not None else self._evaluates(data_loader, [data_loader]):
            self._evaluations += 1
            name = f"evaluation loader {self._evaluations}"
            return self._kept(EvaluationBatches(self, data_loader, name, self._stock_loader, self._begins))
        if self._training is not None:
            raise UnsupportedError(
                "a second DataLoader that trains: a global batch is of one; join the data sets "
                f"(torch.utils.data.ConcatDataset), or, if it evaluates, take {EVALUATES}"
            )
        training = TrainingBatches(self, data_loader)
        if self.engine is not None:
            training.bind(self.engine)
        self._training = training
        return self._kept(training)

    def _kept(self, loader: Any) -> Any:
        self._dataloaders.append(loader)
        return loader

    def _stock_loader(self, loader: DataLoader[Any]) -> Any:
        """Return Accelerate's own loader for the current world."""
        made = super().prepare_data_loader(loader)
        self._dataloaders.remove(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Raise UnsupportedError: a scheduler must be prepared in one call with the model."""
        raise UnsupportedError(
            "accelerator.prepare_scheduler: it would not travel with the job; "
            "accelerator.prepare(model, optimizer, scheduler) in one call"
        )

    def _begin(self, schedules: list[SteadyScheduler]) -> None:
        """Connect loaders, schedules and carried objects to the engine, once the engine is made.

        Carried objects are those whose state new members take over.
        """
        engine = self.engine
        engine.on_change(self._see_change)
        if not engine.idle:
            self._refresh()
        if self._training is not None:
            self._training.bind(engine)
        engine.register_for_checkpointing("accelerate", Counts(self))
        for number, schedule in enumerate(schedules):
            engine.register_for_checkpointing(f"accelerate schedule {number}", CarriedSchedule(schedule))
        for number, value in enumerate(self._custom_objects):
            self._carry(number, value)

    # ---- the world ---------------------------------------------------------------------------------------------------

    def _see_change(self, change: Change) -> None:
        """Refresh Accelerate's state. Called before a batch is fetched in another world or ZeRO stage."""
        if not change.after.idle:
            self._refresh()

    def _refresh(self) -> None:
        """Update everything that Accelerate remembers about the world."""
        engine = self.engine
        numbers.refresh_ranks()
        numbers.refresh_stage(self, engine.layout.zero_stage)
        self.gradient_accumulation_steps = engine.batch.accumulation
        for optimizer in self._optimizers:
            optimizer.__has_overflow__ = hasattr(optimizer.optimizer, "overflow")
        if self._tracked is not None and self.is_main_process and not self.trackers:
            arguments, named = self._tracked
            super().init_trackers(*arguments, **named)

    def init_trackers(self, *arguments: Any, **named: Any) -> None:
        """Start trackers the way Accelerate does. A process that becomes rank 0 later starts its own at that time."""
        self._tracked = arguments, named
        super().init_trackers(*arguments, **named)

    def _begins(self, loader: EvaluationBatches) -> bool:
        """Return whether a pass over an evaluation loader has batches on this process."""
        engine = self.engine
        return engine is None or (not engine.idle and engine._parts.begin_evaluation(loader))

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _do_sync(self) -> None:
        """Set `sync_gradients` the way Accelerate does, except for micro-batches of the training DataLoader.

        These have already set it according to whether they are the last of their global batch.
        """
        if isinstance(self.gradient_state.active_dataloader, TrainingBatches):
            self.step += 1
        else:
            super()._do_sync()

    def backward(self, loss: Any, **named: Any) -> None:
        """Run a backward pass the way Accelerate does.

        Raises DataError if the micro-batch did not come from the training DataLoader, or if further ones were fetched
        before it was trained.
        """
        active = self.gradient_state.active_dataloader
        if not isinstance(active, TrainingBatches):
            raise DataError(
                "accelerator.backward outside of a loop over the training DataLoader, which is the one that shuffles, "
                f"or else the first one that is prepared; if that one evaluates, take {EVALUATES} for it"
            )
        active.note_backward()
        super().backward(loss, **named)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register objects the way Accelerate does, and carry their state to processes that start to work.

        The states must be plain values and tensors.
        """
        first = len(self._custom_objects)
        super().register_for_checkpointing(*objects)
        if self.engine is not None:
            for number, value in enumerate(objects, first):
                self._carry(number, value)

    def _carry(self, number: int, value: Any) -> None:
        self.engine.register_for_checkpointing(f"accelerate object {number}", value)

    def free_memory(self, *objects: Any) -> Any:
        """Free memory the way Accelerate does. This ends the engine's job."""
        released = super().free_memory(*objects)
        self._training = None
        return released
