"""Updates, after each change, of what a Trainer remembers about the world besides Accelerate's numbers."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ProgressCallback

from ds_dynatrain.integrations.huggingface.numbers import refresh_ranks, refresh_stage


def refresh_trainer(trainer: Any) -> None:
    """Update a trainer over a working engine: ranks, stage, the reporting process, and evaluation loaders.

    Evaluation loaders are made anew, because they are cut by ranks.
    """
    refresh_ranks()
    refresh_stage(trainer.accelerator, trainer.deepspeed.layout.zero_stage, trainer.args.hf_deepspeed_config)
    state = trainer.state
    reported, state.is_world_process_zero = state.is_world_process_zero, trainer.is_world_process_zero()
    state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.__dict__.pop("_eval_dataloaders", None)
    if state.is_world_process_zero and not reported:
        _begin_to_report(trainer)


def _begin_to_report(trainer: Any) -> None:
    """Start the progress bar on a process that has become rank 0. Other reporters start when they are first called."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is None:
            callback.on_train_begin(trainer.args, trainer.state, trainer.control)
