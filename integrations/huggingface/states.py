"""An Accelerator's `save_state` and `load_state`, based on the engine's checkpoints.

A checkpoint of `engine.save` does not need the further files that Accelerate writes into its own checkpoints' folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate.accelerator
from accelerate.utils import MODEL_NAME

from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.errors import CheckpointError, ConfigError, UnsupportedError
from ds_dynatrain.integrations.huggingface.loaders import EvaluationBatches, TrainingBatches
from ds_dynatrain.integrations.shared import folders
from ds_dynatrain.report import logger

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object


class Checkpoints(Below):
    """Mix-in over `accelerate.Accelerator` whose checkpoints have one format for every world."""

    engine: Any
    """The ds_dynatrain engine; None before it is made."""
    _training: TrainingBatches | None
    _has_loaded = False

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **named: Any) -> Any:
        """Save the way Accelerate does, in one format for every world.

        A failed save is an error in the log of all processes.
        """
        if named:
            raise UnsupportedError(
                f"save_state({', '.join(named)}): these are DeepSpeed's, and this checkpoint is of ds_dynatrain; "
                "leave them out, or call engine.save_checkpoint"
            )
        engine, stock = self._working("save_state"), accelerate.accelerator
        if engine is None:
            return None
        with (
            replaced(engine, save_checkpoint=self._save),
            replaced(stock, save_accelerator_state=nothing),
        ):
            try:
                return super().save_state(output_dir, safe_serialization)
            except CheckpointError as error:
                logger.error("save_state(%s): %s", output_dir, error)
                return None

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **named: Any) -> None:
        """Load the way Accelerate does, in any world and layout. Accelerate's own checkpoints are read too.

        Members that start to work later get the loaded state.
        """
        self._has_loaded = True
        engine = self._working("load_state")
        if engine is None:
            return
        with replaced(engine, load_checkpoint=self._load), without_ours() as rest:
            super().load_state(input_dir, load_kwargs, **named)
        if rest and self._training is not None:
            self._training.go_to(engine.global_steps)

    def _working(self, call: str) -> Any:
        """Return the engine, or None if it is idle. Raises ConfigError before there is an engine."""
        if self.engine is None:
            raise ConfigError(f"accelerator.{call}: there is no engine yet; prepare the model and its optimizer first")
        return None if self.engine.idle else self.engine

    def _save(self, folder: Any, tag: str) -> None:
        folders.save(self.engine, Path(folder) / tag)

    def _load(self, folder: Any, tag: str, **named: Any) -> None:
        if folders.is_ours(Path(folder) / tag):
            self.engine.load(folder, tag)
        else:
            _, client = type(self.engine).load_checkpoint(self.engine, folder, tag, **named)
            if self._training is not None:
                self._training.refuse_other_epochs((client or {}).get("ds_config", {}))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches of evaluation loaders the way Accelerate does.

        The training loader is already at the position to which `load_state` has moved it.
        """
        if isinstance(dataloader, EvaluationBatches):
            return super().skip_first_batches(dataloader.stock(), num_batches)
        if not self._has_loaded and num_batches:
            raise UnsupportedError(
                f"skip_first_batches({num_batches}) without load_state: batches are micro-batches of one world; "
                "load_state goes to the next sample by itself"
            )
        return dataloader


def nothing(output_dir: Any, *arguments: Any, **named: Any) -> Any:
    """Save nothing.

    Replaces `save_accelerator_state`, because schedules, streams and positions are in the checkpoint.
    """
    return output_dir


@contextmanager
def without_ours() -> Iterator[list[Path]]:
    """Context manager in which Accelerate reads further files only from the folders of its own checkpoints.

    Yields a list that collects these folders.
    """
    stock, read = accelerate.accelerator, list[Path]()
    load_rest, load_object = stock.load_accelerator_state, stock.load_custom_state

    def rest(folder: Any, *arguments: Any, **named: Any) -> Any:
        if folders.is_ours(Path(folder) / MODEL_NAME):
            return {}
        read.append(Path(folder))
        return load_rest(folder, *arguments, **named)

    def custom(value: Any, folder: Any, number: int = 0) -> None:
        if not folders.is_ours(Path(folder) / MODEL_NAME):
            load_object(value, folder, number)

    with replaced(stock, load_accelerator_state=rest, load_custom_state=custom):
        yield read
