"""Calls that save and load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_dynatrain.engine.checkpoints.restoration import Restored
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger

ELSEWHERE = "this member came late, and the others"


class CheckpointCalls(EngineCore):
    """Checkpoints of any layout, and DeepSpeed's own."""

    def save_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> Path:
        """Save all state into a folder of checkpoints, as one that any layout and any world can load.

        Call it on every working member with the same arguments and at the same step, after `engine.step()`. path: a
        folder that all members see. tag: a name in it that is not taken; "step" and the number of steps by default.
        `latest` names it from then on. Returns the checkpoint's own folder.

        CheckpointError, on all members alike, says why there is none; what was there before is as it was, and training
        can go on.
        """
        if self.idle:
            raise CheckpointError("this member is idle and holds no shard: call it on the working members")
        self._window.refuse_checkpoint()
        agreed = self.turns.course.arrive("save_universal", os.fspath(path), tag)
        if agreed is None:
            return _not_saved("save_universal", path, tag)
        folder, name = agreed
        return self._switcher.save(folder, name, self._window_is_open)

    def start_save_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> PendingSave:
        """`save_universal` in the background: the step waits for a copy in host memory, and a thread writes.

        The copy takes as much memory as this member writes, and is kept for the next one. `wait()` of the result gives
        the folder, or raises why there is none; a boundary that finds it failed logs the error. Another save, a load
        and the end of the engine wait for it.
        """
        if self.idle:
            raise CheckpointError("this member is idle and holds no shard: call it on the working members")
        self._window.refuse_checkpoint()
        agreed = self.turns.course.arrive("start_save_universal", os.fspath(path), tag)
        if agreed is None:
            given_up = PendingSave(int(self.global_steps))
            given_up.finish(_not_saved("start_save_universal", path, tag), None)
            return given_up
        folder, name = agreed
        return self._switcher.start_save(folder, name, self._window_is_open)

    def load_universal(
        self, path: str | os.PathLike[str], tag: str | None = None, *, trust_pickle: bool = False
    ) -> Restored:
        """Go on from a checkpoint of `save_universal`, whatever layout and world it was saved in, in the present one.

        One of DeepSpeed's `save_checkpoint` is read as well; streams, positions and objects stay as they are then.
        trust_pickle: of such files, run what they say where they hold more than tensors and plain values.

        Call it on every working member with the same arguments and at the same step. tag: what `latest` names by
        default. All state is replaced: weights, optimizer, counters, schedule, random streams, loaders' positions,
        objects of `carry`; a loader or object that is made later gets its own then. An iterator over a loader goes on
        from the position that was loaded.

        CheckpointError, on all members alike, if there is none, it does not fit, or (CheckpointDamaged) it is not what
        was saved: training goes on as before the call. OutcomeUnknown if this member cannot know whether others
        have loaded it: it trains no further.
        """
        if self.idle:
            raise CheckpointError("this member is idle and holds no shard: call it on the working members")
        self._window.refuse_checkpoint()
        agreed = self.turns.course.arrive("load_universal", os.fspath(path), tag)
        if agreed is None:
            raise CheckpointError(f"load_universal({path}, {tag}): {ELSEWHERE} load nothing here; see engine.epochs")
        self.saver.settle()
        folder, name = agreed
        return self._switcher.load(folder, name, self._window_is_open, trust_pickle)

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, *arguments: Any, **named: Any
    ) -> bool:
        """DeepSpeed's; False, with a warning, if the world is torn in it, or was in this global batch.

        On a member that came late it saves under the folder and tag that the others have said.
        """
        if not self.is_void:
            agreed = self.turns.course.arrive("save_checkpoint", os.fspath(save_dir), tag)
            if agreed is None:
                _not_saved("save_checkpoint", save_dir, tag)
                return False
            save = super().save_checkpoint
            saved = self.membership.surviving(self, lambda: save(*agreed, *arguments, **named), lambda: None)
            if saved is not None:
                return bool(saved)
        logger.warning("save_checkpoint: the world was formed anew in this global batch; nothing whole was saved")
        return False

    def load_checkpoint(
        self, load_dir: Any, tag: Any = None, *arguments: Any, trust_pickle: bool = False, **named: Any
    ) -> Any:
        """DeepSpeed's; and it loads what was saved in another layout, and checkpoints of `save_universal`.

        That is one step for all members, as `load_universal`, which see also for `trust_pickle`; CheckpointError says
        why it cannot be. In the layout that was saved, or with only a part of the state asked for, it is DeepSpeed's.

        On a member that joined a running job it loads nothing, and returns what the job's own call did. Of the client
        state it returns what JSON has a word for.
        """
        known = self.membership.loaded(self.job.number)
        if known is not None:
            logger.info("load_checkpoint: this member joined a running job, whose state it gets in the switch")
            return known
        agreed = self.turns.course.arrive("load_checkpoint", os.fspath(load_dir), tag)
        if agreed is None:
            logger.warning("load_checkpoint(%s, %s): %s load nothing here", load_dir, tag, ELSEWHERE)
            return None, {}
        load_dir, tag = agreed
        if not self.idle and self._switcher.reads(load_dir, tag, arguments, named, trust_pickle):
            found = self.load_universal(load_dir, tag, trust_pickle=trust_pickle)
            result: tuple[Any, ...] = str(found.path), found.client_state
        else:
            result = super().load_checkpoint(load_dir, tag, *arguments, **named)
        self.membership.remember_load(self.job.number, result)
        return result


def _not_saved(call: str, path: str | os.PathLike[str], tag: str | None) -> Path:
    """What a call returns on a member that came late."""
    logger.warning("%s(%s, %s): %s save nothing here", call, path, tag, ELSEWHERE)
    return Path(path) / (tag or "")
