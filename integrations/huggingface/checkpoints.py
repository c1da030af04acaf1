"""Folders `checkpoint-N`: which are complete, what they hold, and how they are read and written.

One of our folders is a checkpoint of `engine.save`, whose tag is the folder's name, with Trainer's files added. A stock
Trainer's folder contains DeepSpeed's folder. Both are read in any world and layout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME as STATE
from transformers.trainer import _is_peft_model

from ds_dynatrain.checkpoint import record
from ds_dynatrain.checkpoint.files import read_small
from ds_dynatrain.checkpoint.folder import LATEST
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointError, ConfigError
from ds_dynatrain.integrations.huggingface.carried import PROGRESS, callback_states, restore_callbacks
from ds_dynatrain.integrations.shared.folders import is_ours, save
from ds_dynatrain.reshard.encoding import decode

_NAME = re.compile(r"checkpoint-(\d+)")
__all__ = ["STATE", "check", "complete", "is_ours", "keep_fallback", "newest", "resume", "save"]


def _is_stock(folder: Path) -> bool:
    """Return whether a stock Trainer has written the folder completely. Such a Trainer writes its own state last."""
    return (folder / STATE).is_file() and any(folder.glob("global_step*"))


def newest(output_dir: str, fallback: Path | None) -> str:
    """Return the folder of the newest complete checkpoint, among those in `output_dir` and those saved on SIGTERM.

    Raises ValueError, as Trainer does, if there is none.
    """
    found: dict[Path, int] = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        name = _NAME.fullmatch(folder.name)
        if name is not None and (is_ours(folder) or _is_stock(folder)):
            found[folder] = int(name[1])
    if fallback is not None and fallback.is_dir():
        found.update({folder: _step(folder) for folder in fallback.iterdir() if is_ours(folder)})
    if not found:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
    return str(max(found, key=lambda folder: found[folder]))


def check(folder: str) -> None:
    """Raise CheckpointError if a folder is not a complete checkpoint."""
    path = Path(folder)
    if is_ours(path) or _is_stock(path):
        return
    holds = ", ".join(sorted(each.name for each in path.iterdir())[:8]) if path.is_dir() else "nothing: it is not there"
    raise CheckpointError(
        f"resume_from_checkpoint={folder!r}: neither a checkpoint of ds_dynatrain nor a stock Trainer's with its "
        f"DeepSpeed folder and {STATE} in it (it holds {holds}); save_only_model leaves no state to go on from"
    )


def complete(folder: str) -> None:
    """Add Trainer's state to a checkpoint that was saved without it, as on SIGTERM.

    The first process to arrive writes the state. All processes would write the same, and the file is replaced
    atomically.
    """
    path = Path(folder) / STATE
    if is_ours(folder) and not path.is_file():
        state = TrainerState(**_carried(Path(folder))["state"])
        beside = path.with_name(f".{STATE}.{os.getpid()}")
        state.save_to_json(str(beside))
        os.replace(beside, path)


def _carried(folder: Path) -> dict[str, Any]:
    """Return the state of `TrainerProgress` in a checkpoint. Raises CheckpointError if no Trainer's job saved it."""
    said = Saved.open(folder).of_rank(0).get("rest", {}).get("objects", {}).get(PROGRESS)
    if said is None:
        raise CheckpointError(f"{folder} is not of a Trainer's job: it has no steps and no log; load its weights alone")
    found: dict[str, Any] = decode(said, [])
    return found


def _step(folder: Path) -> int:
    return int(record.from_bytes(read_small(folder / record.RECORD)).step)


def keep_fallback(fallback: Path | None, output_dir: str, step: int) -> None:
    """Rename the checkpoint of this step that was saved on SIGTERM to `checkpoint-N`, unless that exists.

    Called only by rank 0.
    """
    target = Path(output_dir) / f"checkpoint-{step}"
    if fallback is None or not fallback.is_dir() or target.exists():
        return
    for folder in (each for each in fallback.iterdir() if is_ours(each)):
        if _step(folder) == step:
            os.rename(folder, target)
            (fallback / LATEST).unlink(missing_ok=True)
            complete(str(target))
            return


def resume(trainer: Any, engine: Any, folder: str) -> None:
    """Continue from a checkpoint. A new member already has the job's state, and loads nothing.

    A stock Trainer's checkpoint with adapters has no frozen weights, which stay as the base model has them. Raises
    ConfigError if the checkpoint was saved with another global batch, or if its epochs have a different number of
    steps, because a step would then train other samples.
    """
    path = Path(folder)
    ours = is_ours(path)
    where = (str(path.parent), path.name) if ours else (str(path),)
    of_callbacks = callback_states(trainer)  # Trainer has set these if restore_callback_states_from_checkpoint
    _, client = engine.load_checkpoint(*where, load_module_strict=not _is_peft_model(trainer.model))
    restore_callbacks(trainer, of_callbacks)
    if ours or engine.is_newcomer:
        return
    saved = (client or {}).get("ds_config", {})
    batch, held = trainer._settings.global_batch, saved.get("train_batch_size")
    if isinstance(held, int) and held != batch:
        raise ConfigError(
            f"resume_from_checkpoint={folder!r} was saved with a global batch of {held} samples, and this job's is "
            f"{batch}: set train_batch_size in the DeepSpeed configuration to {held} (the number of ranks does not "
            "matter), or start from its weights alone"
        )
    trainer.global_batches.refuse_other_epochs(saved)
    trainer._load_optimizer_and_scheduler(folder)
    trainer.global_batches.go_to(trainer.state.global_step)
