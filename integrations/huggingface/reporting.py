"""What a Trainer remembers of the world, besides what Accelerate does: put right after each change."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback

from ds_dynatrain.engine.changes import Change
from ds_dynatrain.integrations.huggingface.numbers import refresh_ranks, refresh_stage
from ds_dynatrain.report import SwitchEvent


def refresh_trainer(trainer: Any) -> None:
    """A trainer over a working engine: ranks, stage, who reports, and evaluation loaders, which are cut by ranks."""
    refresh_ranks()
    refresh_stage(trainer.accelerator, trainer.deepspeed.layout.zero_stage, trainer.args.hf_deepspeed_config)
    state = trainer.state
    reported, state.is_world_process_zero = state.is_world_process_zero, trainer.is_world_process_zero()
    state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.__dict__.pop("_eval_dataloaders", None)
    if state.is_world_process_zero and not reported:
        _begin_to_report(trainer)


def say_change(change: Change, event: SwitchEvent | None) -> None:
    """Print a line about a change among those of Trainer's own log, which are printed too; called on rank 0.

    event: of the last switch, whose pause is told if it has led to this world.
    """
    pause = ""
    if event is not None and event.generation == change.after.generation:
        pause = f", {event.pause_ms:.0f} ms"
    before, after = (f"{place.layout} on {len(place.members)} ranks" for place in (change.before, change.after))
    tqdm.write(f"step {change.step}: {before} -> {after} ({change.reason}{pause})")


def _begin_to_report(trainer: Any) -> None:
    """This process has become rank 0: other reporters set themselves up when they are first asked, the bar does not."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is None:
            callback.on_train_begin(trainer.args, trainer.state, trainer.control)
