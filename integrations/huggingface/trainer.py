"""Methods of a Trainer that know about the world, mixed into any trainer class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.engine.changes import Change
from ds_dynatrain.errors import CheckpointError, WorldChanged
from ds_dynatrain.integrations.huggingface import checkpoints, names, refusals, settings
from ds_dynatrain.integrations.huggingface.callbacks import Following, SwitchCallback
from ds_dynatrain.integrations.huggingface.carried import PROGRESS, TrainerProgress
from ds_dynatrain.integrations.huggingface.reporting import refresh_trainer
from ds_dynatrain.integrations.huggingface.schedules import restore_schedule, schedule_of
from ds_dynatrain.integrations.shared.batches import GlobalBatches, Window
from ds_dynatrain.integrations.shared.names import check
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.report.monitors import metrics

check(names.TRAINER, "transformers", "transformers")
check(names.ACCELERATE, "accelerate", "transformers")


if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object
"""The trainer's class that the mix-in extends."""


class ElasticMixin(Below):
    """Mix-in over a class of `transformers.Trainer`: `class Mine(ElasticMixin, Trainer)`.

    `elastic` makes such classes.
    """

    global_batches: GlobalBatches
    progress: TrainerProgress
    _settings: settings.Settings
    _is_by_tokens = False
    """Whether the open window's losses are divided by the tokens of all ranks."""
    _seed: int | None = None
    """Seed for the order of samples; None before the first call of `train`."""
    _schedule: dict[str, Any] | None = None
    """State of the schedule before the window (one global batch)."""
    _reported: dict[tuple[str, ...], int]
    _switched: dict[str, float]
    """A map from each set of names in a log row to the last step for which it was reported."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.begin((*arguments, *named.values()))
        super().__init__(*arguments, **named)
        self.finish()

    def begin(self, given: Sequence[Any]) -> None:
        """Check the arguments, and set those that the configuration determines. Runs before Trainer's constructor.

        given: the constructor's arguments.
        """
        args = settings.arguments_in(given)
        refusals.refuse_trainer(type(self))
        refusals.refuse_arguments(args)
        self._settings = settings.settle(args)

    def finish(self) -> None:
        """Add the `Following` callback. Called after Trainer's constructor."""
        self.callback_handler.callbacks.insert(0, Following(self))

    @property
    def engine(self) -> Any:
        """The ds_dynatrain engine, during training and afterwards; None before training."""
        return self.deepspeed

    # ---- the batches -------------------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of samples in an optimizer step, which is the same in every world."""
        return self._settings.global_batch

    def get_train_dataloader(self) -> Any:
        """Return the loader of global batches, over Trainer's DataLoader or that of a subclass.

        The DataLoader is taken before Accelerate cuts it for the current world. Raises ConfigError if its batches
        differ from `per_device_train_batch_size`, and UnsupportedError if it is not a DataLoader.
        """
        with replaced(self.accelerator, prepare=lambda *given, **_: given[0] if len(given) == 1 else given):
            loader: Any = super().get_train_dataloader()
        refusals.refuse_loader(loader, self._train_batch_size)
        if self._seed is None:  # later, each rank has random streams of its own
            self._seed = self.args.data_seed if self.args.data_seed is not None else torch.initial_seed()
        if isinstance(loader.sampler, LengthGroupedSampler):  # grouped for a global batch, alike on all ranks
            loader.sampler.batch_size = self._settings.global_batch
            loader.sampler.generator = torch.Generator().manual_seed(self._seed)
        self.global_batches = GlobalBatches(loader, self._settings.global_batch, "trainer", self._seed)
        return self.global_batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Window], num_batches: int, device: torch.device
    ) -> tuple[list[Window], torch.Tensor | int | None]:
        """Return one global batch, as one item, and its number of tokens over all ranks if this trainer counts them."""
        try:
            window = next(epoch_iterator, None)
        except SystemExit:
            if self.state.is_world_process_zero:
                checkpoints.keep_fallback(self._settings.fallback, self._get_output_dir(None), self.state.global_step)
            raise
        if window is None:
            return [], None
        counted = [_without_labels(one.data) if one.is_borrowed else one.data for one in window]
        try:
            count = self._get_num_items_in_batch(counted, device)
        except WorldChanged:  # this global batch will be repeated
            count = torch.tensor(1, device=device)
        self._is_by_tokens = count is not None
        return [window], count

    def training_step(self, model: Any, inputs: Window, num_items_in_batch: Any = None) -> torch.Tensor:
        """Train each micro-batch of a global batch the way Trainer does. Return the loss of this rank's part."""
        total = torch.zeros((), device=self.args.device)
        self.current_gradient_accumulation_steps = len(inputs)
        for one in inputs:
            self.accelerator.gradient_state._set_sync_gradients(one.is_last)
            with model.micro_batch(one, is_divided=self._is_by_tokens):
                loss = super().training_step(model, one.data, num_items_in_batch)
            if not one.is_borrowed:
                total += loss if self._is_by_tokens or one.weight == 1 else loss * one.weight
        return torch.zeros_like(total) if model.is_discarded else total

    def floating_point_ops(self, inputs: Window) -> int:
        """Return the number of floating-point operations of all micro-batches."""
        return sum(super(ElasticMixin, self).floating_point_ops(one.data) for one in inputs)

    def _track_num_input_tokens(self, inputs: Window) -> None:
        """Count the tokens of all micro-batches. A borrowed one counts none, but takes part in the collective."""
        try:
            for one in inputs:
                super()._track_num_input_tokens(_without_samples(one.data) if one.is_borrowed else one.data)
        except WorldChanged as error:
            logger.warning(
                "step %d: its tokens are not counted (%s); it is made once more", self.state.global_step, error
            )

    # ---- the world ---------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Make the engine the way Trainer does, then restore a checkpoint or take over the job's state."""
        engine, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
        self._reported, self._switched = {}, {}
        loader.bind(engine, self._begin_window)
        engine.on_change(self._see_change)
        engine.on_switch(self._note_switch)
        self.progress = TrainerProgress(self)
        engine.register_for_checkpointing(PROGRESS, self.progress)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SwitchCallback):
                callback.engine = engine
        if resume_from_checkpoint is not None and not engine.idle:
            checkpoints.resume(self, engine, resume_from_checkpoint)
        if not engine.idle:
            refresh_trainer(self)
        return engine, loader

    def _see_change(self, change: Change) -> None:
        """Refresh the trainer. Called before a batch is fetched in another world or ZeRO stage."""
        if not change.after.idle:
            refresh_trainer(self)

    def _note_switch(self, event: SwitchEvent) -> None:
        """Keep the numbers of a switch for the next log of a loss."""
        self._switched |= {f"dynatrain/{name}": value for name, value in metrics(event).items()}

    def _begin_window(self) -> None:
        """Keep the state of the schedule. Called when a global batch has been fetched."""
        self._schedule = schedule_of(self.lr_scheduler)

    def end_window(self) -> None:
        """Restore the schedule if the step of the global batch was discarded. Called after the step."""
        if self.engine.is_discarded and self._schedule is not None:
            restore_schedule(self.lr_scheduler, self.optimizer, self._schedule)

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        """Log, save and evaluate the way Trainer does, unless the batch is discarded or the world ends meanwhile.

        If a checkpoint cannot be saved, an error is logged on all processes, and training continues.
        """
        if self.engine.is_discarded:
            return
        try:
            super()._maybe_log_save_evaluate(*arguments, **named)
        except CheckpointError as error:
            logger.error("step %d: %s", self.state.global_step, error)
        except WorldChanged as error:
            logger.warning(
                "step %d: what was to be logged, evaluated or saved is left out, for the world has changed in it "
                "(%s); it is done when it is due again",
                self.state.global_step,
                error,
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the way Trainer does, but only once for a step that is repeated after a death.

        The history has both rows. A row with a loss also has the numbers of a switch since the one before.
        """
        kind, step = tuple(sorted(logs)), int(self.state.global_step)
        if "loss" in logs:
            logs, self._switched = {**logs, **self._switched}, {}
        if step > self._reported.get(kind, -1):
            self._reported[kind] = step
            super().log(logs, start_time)
        else:
            self.state.log_history.append({**logs, "epoch": self.state.epoch, "step": step})

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Evaluate the way Trainer does. Only processes that start the job evaluate for `eval_on_start`."""
        is_at_start = skip_scheduler
        if is_at_start and (self.engine.idle or self.engine.is_newcomer):
            return {}
        found: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return found

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any) -> Any:
        """Train the way Trainer does.

        resume_from_checkpoint: True continues from the newest complete checkpoint in `output_dir`, or from one saved on
            SIGTERM.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.newest(self._get_output_dir(None), self._settings.fallback)
        elif isinstance(resume_from_checkpoint, str):
            checkpoints.check(resume_from_checkpoint)
        if isinstance(resume_from_checkpoint, str):
            checkpoints.complete(resume_from_checkpoint)
        if self.deepspeed is not None:
            self._let_engine_go()
        return super().train(resume_from_checkpoint, *arguments, **named)

    def _let_engine_go(self) -> None:
        """End the engine of an earlier call of `train`. This call makes a new one from the current weights.

        Raises UnsupportedError if not all processes reach this point again, because idle ones end with the first call.
        """
        refusals.refuse_second_training(self.engine)
        self.accelerator.free_memory()
        for name in ("deepspeed", "optimizer", "lr_scheduler"):
            setattr(self, name, None)
        self.model_wrapped = self.model

    def _init_training_state(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        """Begin the way Trainer does, but skip no batches, because the loader moves to its position by itself."""
        epochs, _ = super()._init_training_state(*arguments, **named)
        return epochs, 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save all state in one format for every world, then add Trainer's files."""
        if not self.args.save_only_model:
            folder = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            checkpoints.save(self.engine, folder)
        super()._save_checkpoint(model, trial)

    def _load_best_model(self) -> None:
        """Load the best model the way Trainer does, also from our checkpoints.

        The weights are restored, but the progress of the training stays.
        """
        folder = self.state.best_model_checkpoint
        if not checkpoints.is_ours(folder):
            super()._load_best_model()
            return
        logger.info("loading the best model from %s (score: %s)", folder, self.state.best_metric)
        said = self.progress.state_dict()
        self.engine.load_checkpoint(os.path.dirname(folder), os.path.basename(folder))
        self.progress.load_state_dict(said)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write a schedule of transformers to the place where a stock Trainer looks for it.

        The checkpoint already has all other state.
        """
        schedule = schedule_of(self.lr_scheduler)
        if self.args.should_save and schedule is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing, because random streams are already in the checkpoint."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load a stock Trainer's random streams, if there is a file for this rank. The streams of a ds_dynatrain
        checkpoint were already loaded with the state.
        """
        if checkpoint is not None and not checkpoints.is_ours(checkpoint):
            super()._load_rng_state(checkpoint)


def _without_samples(batch: Any) -> Any:
    """Return a batch with no samples."""
    return {name: held[:0] if isinstance(held, torch.Tensor) else held for name, held in batch.items()}


def _without_labels(batch: Any) -> Any:
    """Return a batch whose labels count as zero tokens."""
    labels = batch.get("labels") if hasattr(batch, "get") else None
    return {**batch, "labels": torch.full_like(labels, -100)} if isinstance(labels, torch.Tensor) else batch
