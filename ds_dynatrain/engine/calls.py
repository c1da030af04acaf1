"""Implementation of an engine's calls that save and load checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_dynatrain.engine.checkpoints import restore
from ds_dynatrain.engine.checkpoints import stock_folder as stock
from ds_dynatrain.engine.checkpoints.saving import PendingSave, Saver
from ds_dynatrain.engine.checkpoints.sources import ALL, CheckpointPart
from ds_dynatrain.engine.discarded import DiscardableBatch
from ds_dynatrain.engine.switcher import Switcher
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Restored

ELSEWHERE = "this member came late, and the others"
COUNT = "loop over engine.epochs(n), which counts the job's epochs"


class Checkpoints:
    """Calls that save and load checkpoints, in our format and in DeepSpeed's; see the methods of `DynatrainEngine`."""

    def __init__(self, engine: EngineCore, switcher: Switcher, saver: Saver, window: DiscardableBatch) -> None:
        self.engine, self._switcher, self._saver, self._window = engine, switcher, saver, window

    def save(self, path: str | os.PathLike[str], tag: str | None, background: bool) -> Path | PendingSave:
        """Save a checkpoint; see `DynatrainEngine.save`."""
        agreed = self._arrive("save in the background" if background else "save", path, tag)
        if agreed is None:
            given_up = PendingSave(self.engine.global_steps)
            given_up.run(lambda: _not_saved("save", path, tag))
            return given_up if background else given_up.wait()
        folder, name = agreed
        how = self._saver.start if background else self._saver.save
        in_the_way = self._switcher.in_the_way(of_reading=True)
        return how(folder, name, self._key("save"), in_the_way, None)

    def load(
        self, path: str | os.PathLike[str], tag: str | None, trust_pickle: bool, part: CheckpointPart = ALL
    ) -> Restored:
        """Load a checkpoint; see `DynatrainEngine.load`. Like a switch, this uses up a generation number.

        part: see `FromCheckpoint`.
        """
        agreed = self._arrive("load", path, tag)
        if agreed is None:
            raise CheckpointError(
                f"load({path}, {tag}): {ELSEWHERE} load nothing here; loop over engine.epochs(n), which counts the "
                "job's epochs"
            )
        self._saver.settle()
        folder, name = agreed
        engine, place, in_the_way = self.engine, self._switcher.place_in_training(), self._switcher.in_the_way()
        engine.attempt += 1
        engine.begin_segment()
        found = restore.load(engine, folder, name, place, engine.attempt, in_the_way, trust_pickle, part)
        engine.note_safe()
        return found

    def save_stock(self, save: Callable[..., Any], folder: Any, tag: Any) -> bool:
        """Save a checkpoint with DeepSpeed; see `DynatrainEngine.save_checkpoint`.

        save: DeepSpeed's call, which takes a folder and a tag.
        """
        self._refuse_late("save_checkpoint")
        self._refuse_map("save_checkpoint", "use engine.save, which saves any layout")
        if self.engine.layout.order is not None:
            raise CheckpointError(
                f"save_checkpoint: in {self.engine.layout} the flat buffers hold the tensors in another order than "
                "DeepSpeed's, which its load would not notice; call engine.save, which any layout can load"
            )
        if not self.engine.is_discarded:
            agreed = PROCESS.sync_points.arrive("save_checkpoint", os.fspath(folder), tag)
            if agreed is None:
                _not_saved("save_checkpoint", folder, tag)
                return False

            def call() -> Any:
                self.engine.agree()
                stock.note_experts(self.engine, *agreed)
                return save(*agreed)

            saved = PROCESS.membership.surviving(self.engine, call, lambda: None)
            if saved is not None:
                return bool(saved)
        logger.warning(
            "save_checkpoint(%s, %s): the world was formed anew in this global batch, and nothing whole was saved; "
            "call it again after the next engine.step()",
            *(folder, tag),
        )
        return False

    def load_stock(
        self, load: Callable[..., Any], folder: Any, tag: Any, trust_pickle: bool, part: CheckpointPart
    ) -> Any:
        """Load a checkpoint of either format; see `DynatrainEngine.load_checkpoint`.

        load: DeepSpeed's call.
        """
        engine = self.engine
        known = PROCESS.membership.loaded(engine.job.number) if engine.idle else None
        self._refuse_late("load_checkpoint")
        if known is not None:
            logger.info("load_checkpoint: this member joined a running job, whose state it gets in the switch")
            return known
        agreed = PROCESS.sync_points.arrive("load_checkpoint", os.fspath(folder), tag)
        if agreed is None:
            logger.warning("load_checkpoint(%s, %s): %s load nothing here; %s", folder, tag, ELSEWHERE, COUNT)
            return None, {}
        folder, tag = agreed
        if not engine.idle and stock.is_for_us(engine, self._key("stock"), folder, tag, part, trust_pickle):
            found = self.load(folder, tag, trust_pickle, part)
            result: tuple[Any, ...] = str(found.path), found.client_state
        else:
            self._refuse_map("load_checkpoint", "switch to a map in order first, or load a checkpoint of engine.save")
            if not engine.idle:
                engine.begin_segment()
            result = load(folder, tag, *part)
        PROCESS.membership.remember_load(engine.job.number, result)
        return result

    def _key(self, call: str) -> str:
        """Return a key in the job's key-value store that no other call uses."""
        return f"{call}/{self._switcher.place_in_training()}"

    def _refuse_late(self, call: str) -> None:
        """Raise CheckpointError on all members while part of the state is still moving after a late switch."""
        if self.engine.awaits_late:
            raise CheckpointError(f"{call}: {self._switcher.in_the_way()}; call it after that")

    def _refuse_map(self, call: str, way_out: str) -> None:
        """Raise CheckpointError under a map of experts, because DeepSpeed numbers the files of experts by place."""
        if self.engine.layout.experts is not None:
            raise CheckpointError(
                f"{call}: the layout has a map of experts, and DeepSpeed's files would mix up experts that are not at "
                f"the place of their number; {way_out}"
            )

    def _arrive(self, call: str, path: str | os.PathLike[str], tag: str | None) -> list[Any] | None:
        """Return the agreed folder and tag; None on a member that joined late, because the others are elsewhere in
        their scripts.

        Raises CheckpointError on an idle member, in a discarded batch, and during a late switch.
        """
        if self.engine.idle:
            raise CheckpointError(
                f"{call}: this member is idle and holds no shard; call it on the working members, where engine.idle "
                "is false"
            )
        self._window.refuse_checkpoint()
        self._refuse_late(call)
        return PROCESS.sync_points.arrive(call, os.fspath(path), tag)


def _not_saved(call: str, path: str | os.PathLike[str], tag: str | None) -> Path:
    """Log that this member, which joined late, saves nothing, and return the path that its call returns."""
    logger.warning("%s(%s, %s): %s save nothing here; %s", call, path, tag, ELSEWHERE, COUNT)
    return Path(path) / (tag or "")
