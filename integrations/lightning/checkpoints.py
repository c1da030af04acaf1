"""Lightning's checkpoints, written by the engine in one format for every world.

Checkpoints of Lightning's own DeepSpeed strategy are read too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import torch

from ds_dynatrain.errors import CheckpointError, ConfigError, UnsupportedError, WorldChanged
from ds_dynatrain.integrations.lightning.carried import TrainerProgress
from ds_dynatrain.integrations.lightning.refusals import refuse_other_epochs
from ds_dynatrain.integrations.shared import folders
from ds_dynatrain.integrations.shared.batches import GlobalBatches
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.encoding import encode

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object

_IN_THE_ENGINE = ("state_dict", "optimizer_states")
_TAG = "checkpoint"
"""Name of our folder inside the folder that Lightning names, as in Lightning's own checkpoints."""
_OPTIONAL = "hyper_parameters", "datamodule_hyper_parameters"
_COUNTED = "epoch_loop.batch_progress"


class Nothing(dict[str, Any]):
    """Checkpoint of an idle process.

    It restores nothing, because the process takes over all state when it begins to work.
    """

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": lightning.pytorch.__version__})

    def __bool__(self) -> bool:
        return False


class Checkpoints(Below):
    """Mix-in over Lightning's DeepSpeedStrategy that saves and loads with the engine."""

    engine: Any
    is_lost: bool
    _progress: TrainerProgress
    _training: GlobalBatches | None
    trust_pickle: bool

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing, because the engine saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing, because the engine saves the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save all state into the folder `filepath`.

        checkpoint: the values from Lightning, callbacks and hooks, which are saved too.

        If the world is lost meanwhile, nothing is saved, and a warning is logged.

        Raises CheckpointError, on all processes alike, if the checkpoint cannot be saved. Raises ConfigError for values
        that are not plain.
        """
        if storage_options is not None:
            raise TypeError("trainer.save_checkpoint(storage_options=...): no CheckpointIO is used here; leave it out")
        if self.engine is None:
            raise ConfigError("trainer.save_checkpoint: there is no engine yet; call it in or after trainer.fit")
        if self.engine.idle:
            return
        folder = _local(self.broadcast(filepath))
        self._progress.saving = plain({name: held for name, held in checkpoint.items() if name not in _IN_THE_ENGINE})
        try:
            folders.save(self.engine, folder / _TAG)
        except (CheckpointError, WorldChanged) as error:
            if not self.is_lost:
                raise
            logger.warning(
                "%s is left out, for the world has changed in its save (%s); earlier checkpoints are kept",
                *(folder, error),
            )
        finally:
            self._progress.saving = None

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove an old checkpoint the way Lightning does. It is kept if the new one could not be saved."""
        if not self.is_lost:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Continue from a folder, in any world and layout: one of ours, or one of Lightning's DeepSpeed strategy."""
        if self.engine.idle:
            return Nothing()
        folder = _local(self.broadcast(checkpoint_path))
        if folders.is_ours(folder / _TAG):
            return self._progress.loaded(lambda: self.engine.load(folder, _TAG))
        if folders.is_ours(folder):  # saved on SIGTERM
            return self._progress.loaded(lambda: self.engine.load(folder.parent, folder.name))
        if not (folder / _TAG).is_dir():
            raise CheckpointError(
                f"ckpt_path={str(folder)!r}: neither a checkpoint of ds_dynatrain nor one of Lightning's DeepSpeed "
                f"strategy, with a folder {_TAG!r} in it; load a file of weights into the module"
            )
        return self._loaded_of_stock(folder)

    def _loaded_of_stock(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint of Lightning's DeepSpeed strategy.

        Such a checkpoint counts micro-batches of the world that saved it.
        """
        strict = self.lightning_module.strict_loading
        _, found = self.engine.load_checkpoint(
            str(folder), _TAG, load_module_strict=strict, trust_pickle=self.trust_pickle
        )
        client: dict[str, Any] = dict(found or {})
        held = client.get("ds_config", {})
        batch, saved = self.engine.global_batch_size, held.get("train_batch_size")
        if isinstance(saved, int) and saved != batch:
            raise ConfigError(
                f"ckpt_path={str(folder)!r} was saved with a global batch of {saved} samples, and this job's is "
                f"{batch}: set train_batch_size in the DeepSpeed configuration to {saved} (the number of ranks does "
                "not matter), or start from its weights alone"
            )
        if self._training is not None:
            refuse_other_epochs(self._training, batch, held)
            self._training.go_to(int(client.get("global_step", self.engine.global_steps)))
        return _in_steps(client, int(held.get("gradient_accumulation_steps", 1)))


def _local(path: Any) -> Path:
    """Return a path. Raises UnsupportedError if it is not in a file system."""
    if "://" in str(path):
        raise UnsupportedError(
            f"checkpoints at {str(path)!r}: they are written into a folder that all processes see; give a path in a "
            "shared file system"
        )
    return Path(path)


def plain(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the values to save. Hyper-parameters that are not plain values are left out, with a warning.

    Raises ConfigError, naming the value, for any other value that is not plain.
    """
    found = dict(checkpoint)
    for table in (name for name in _OPTIONAL if isinstance(found.get(name), dict)):
        kept = {name: held for name, held in found[table].items() if _is_plain(held)}
        left = sorted(set(found[table]) - set(kept))
        if left:
            logger.warning(
                "%s %s: no plain values, and not in the checkpoint; give plain values to have them there",
                *(table, ", ".join(left)),
            )
        found[table] = kept
    encode(found, list[torch.Tensor](), "checkpoint")
    return found


def _is_plain(value: Any) -> bool:
    try:
        encode(value, list[torch.Tensor]())
    except ConfigError:
        return False
    return True


def _in_steps(client: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Return a checkpoint's state with the training loop's batches counted in optimizer steps."""
    loops = client.get("loops", {})
    fit = dict(loops.get("fit_loop", {}))
    if _COUNTED not in fit or accumulation == 1:
        return client
    progress = {
        part: {name: number // accumulation for name, number in held.items()} if isinstance(held, dict) else held
        for part, held in fit[_COUNTED].items()
    }
    return {**client, "loops": {**loops, "fit_loop": {**fit, _COUNTED: progress}}}
