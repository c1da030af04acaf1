"""Implementation of the engine's calls that save and load checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_dynatrain.checkpoint import folder as folders
from ds_dynatrain.checkpoint.others.zero_files import ZeroFolder
from ds_dynatrain.checkpoint.others.zero_folder import rules_then
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints import restore
from ds_dynatrain.engine.checkpoints.other_tools import check_batch
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.checkpoints.sources import CheckpointPart
from ds_dynatrain.engine.discarded import DISCARDED
from ds_dynatrain.engine.loaders import LoadingEngine
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.membership.session import Session
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Restored
from ds_dynatrain.space import MASTER, Layout, VirtualParameterSpace

ELSEWHERE = "this member came late, and the others"
COUNT = "loop over engine.epochs(n), which counts the job's epochs"
EXPERT_SIZE = "ds_dynatrain_expert_size.json"
"""File that records the expert size beside the files of a DeepSpeed checkpoint, which do not state it. DeepSpeed reads
masters and optimizer states of experts by rank, so at another expert size it would give them to the wrong experts."""


class SavingEngine(LoadingEngine):
    """An engine that saves and loads checkpoints in our format and in DeepSpeed's; see `DynatrainEngine`."""

    def save(self, path: str | os.PathLike[str], tag: str | None, background: bool) -> Path | PendingSave:
        """Save a checkpoint; see `DynatrainEngine.save`."""
        agreed = self._arrive("save in the background" if background else "save", path, tag)
        if agreed is None:
            pending = PendingSave(self.global_steps)
            pending.run(lambda: _not_saved("save", path, tag))
        else:
            key, in_the_way = self._key("save"), self.in_the_way(of_reading=True)
            pending = self.saver.save(agreed[0], agreed[1], key, in_the_way, None, background)
        return pending if background else pending.wait()

    def load(self, path: str | os.PathLike[str], tag: str | None, part: CheckpointPart) -> Restored:
        """Load a checkpoint; see `DynatrainEngine.load`. A load uses up a generation number, as a switch does.

        part: the part of the checkpoint to load.
        """
        agreed = self._arrive("load", path, tag)
        if agreed is None:
            raise CheckpointError(f"load({path}, {tag}): {ELSEWHERE} load nothing here; {COUNT}")
        self.saver.settle()
        place, in_the_way = self.place_in_training(), self.in_the_way()
        self.attempt += 1
        self.begin_segment()
        folder, name = Path(agreed[0]).absolute(), agreed[1]
        found = restore.load(self, folder, name, place, in_the_way, part)
        self.note_safe()
        return found

    def save_stock(self, save: Callable[..., Any], folder: Any, tag: Any) -> bool:
        """Save a checkpoint with DeepSpeed; see `DynatrainEngine.save_checkpoint`.

        save: DeepSpeed's call, which takes a folder and a tag.
        """
        self._refuse_late("save_checkpoint")
        self._refuse_map("save_checkpoint", "use engine.save, which saves any layout")
        if self.layout.order is not None:
            raise CheckpointError(
                f"save_checkpoint: in {self.layout} the flat buffers hold the tensors in another order than "
                "DeepSpeed's, which its load would not notice; call engine.save, which any layout can load"
            )
        if not self.is_discarded:
            agreed = PROCESS.sync_points.arrive("save_checkpoint", os.fspath(folder), tag)
            if agreed is None:
                _not_saved("save_checkpoint", folder, tag)
                return False

            def call() -> Any:
                self.agree()
                if self.rank == 0 and any(each.expert for each in self.vps.tensors):
                    name = f"global_step{self.global_steps}" if agreed[1] is None else str(agreed[1])
                    path = Path(agreed[0]) / name
                    path.mkdir(parents=True, exist_ok=True)
                    (path / EXPERT_SIZE).write_text(json.dumps(self.layout.expert), encoding="utf-8")
                return save(*agreed)

            saved = PROCESS.membership.surviving(self, call, lambda: None)
            if saved is not None:
                return bool(saved)
        logger.warning(
            "save_checkpoint(%s, %s): the world was formed anew in this global batch, and nothing whole was saved; "
            "call it again after the next engine.step()",
            *(folder, tag),
        )
        return False

    def load_stock(self, load: Callable[..., Any], folder: Any, tag: Any, part: CheckpointPart) -> Any:
        """Load a checkpoint of either format; see `DynatrainEngine.load_checkpoint`.

        load: DeepSpeed's call.
        """
        known = PROCESS.membership.loaded(self.job.number) if self.idle else None
        self._refuse_late("load_checkpoint")
        if known is not None:
            logger.info("load_checkpoint: this member joined a running job, whose state it gets in the switch")
            return known
        agreed = PROCESS.sync_points.arrive("load_checkpoint", os.fspath(folder), tag)
        if agreed is None:
            logger.warning("load_checkpoint(%s, %s): %s load nothing here; %s", folder, tag, ELSEWHERE, COUNT)
            return None, {}
        folder, tag = agreed
        if not self.idle and self._is_for_us(folder, tag, part):
            found = self.load(folder, tag, part)
            result: tuple[Any, ...] = str(found.path), found.client_state
        else:
            self._refuse_map("load_checkpoint", "switch to a map in order first, or load a checkpoint of engine.save")
            if not self.idle:
                self.begin_segment()
            result = load(folder, tag, *part[:-1])
        PROCESS.membership.remember_load(self.job.number, result)
        return result

    def _key(self, call: str) -> str:
        """Return a key for a call, which is unique in this job."""
        return f"{call}/{self.place_in_training()}"

    def _refuse_late(self, call: str) -> None:
        """Raise CheckpointError on all members if a late switch is not complete, because some optimizer state is still
        in transit."""
        if self.awaits_late:
            raise CheckpointError(f"{call}: {self.in_the_way()}; call it after that")

    def _refuse_map(self, call: str, way_out: str) -> None:
        """Raise CheckpointError if the layout assigns experts to ranks by a map: DeepSpeed names the files of experts
        by their position on the ranks rather than by expert."""
        if self.layout.experts is not None:
            raise CheckpointError(
                f"{call}: the layout has a map of experts, and DeepSpeed's files would mix up experts that are not at "
                f"the place of their number; {way_out}"
            )

    def _arrive(self, call: str, path: str | os.PathLike[str], tag: str | None) -> list[Any] | None:
        """Return the folder and tag that all members use; None on a member that joined late and is not at the same call
        as the others.

        Raises CheckpointError on an idle member, in a discarded batch, and during a late switch (optimizer state is
        still in transit).
        """
        if self.idle:
            raise CheckpointError(
                f"{call}: this member is idle and holds no shard; call it on the working members, where engine.idle "
                "is false"
            )
        if self.is_discarded:
            raise CheckpointError("; ".join(DISCARDED))
        self._refuse_late(call)
        return PROCESS.sync_points.arrive(call, os.fspath(path), tag)

    # ---- whether DeepSpeed reads a checkpoint itself, or our code reads it -------------------------------------------

    def _is_for_us(self, load_dir: Any, tag: Any, part: CheckpointPart) -> bool:
        """Return whether our code, instead of DeepSpeed's, has to load a checkpoint: one in our format, or one that
        DeepSpeed cannot load in this layout.

        Rank 0 decides for all working members.

        Raises CheckpointError on all members if no decision is possible, or if only weights are requested and DeepSpeed
        would not read them.
        """
        key = self._key("stock")
        if self.deepspeed.load_universal_checkpoint():
            return False
        session = Session(self.control, key, self.members, "load_checkpoint", is_patient=True)
        return session.first("is_for_us", lambda: _is_read_here(self, load_dir, tag, part), "looking at a checkpoint")


def _not_saved(call: str, path: str | os.PathLike[str], tag: str | None) -> Path:
    """Log that this member, which joined late, saves nothing; return the path that its call to save returns."""
    logger.warning("%s(%s, %s): %s save nothing here; %s", call, path, tag, ELSEWHERE, COUNT)
    return Path(path) / (tag or "")


def _is_read_here(engine: EngineCore, load_dir: Any, tag: Any, part: CheckpointPart) -> bool:
    try:
        path = Path(load_dir) / (folders.latest(Path(load_dir)) if tag is None else str(tag))
    except CheckpointError:
        return False  # DeepSpeed raises its own error
    is_ours, held = (path / RECORD).is_file(), None
    if not is_ours:
        if part.load_optimizer_states and not part.load_module_only:
            said = path / EXPERT_SIZE
            size = json.loads(said.read_text(encoding="utf-8")) if said.is_file() else engine.layout.expert
            if size != engine.layout.expert:
                raise CheckpointError(
                    f"load_checkpoint: {path} was saved with expert={size}, and this layout has "
                    f"expert={engine.layout.expert}: DeepSpeed would give experts each other's masters and moments; "
                    f"call engine.switch(expert={size}) first, or load a checkpoint of engine.save, which loads into "
                    "any layout"
                )
        with suppress(CheckpointError):  # no checkpoint, or one that our code cannot read
            held = ZeroFolder.open(path, part.trust_pickle)
    if part.is_read_here:
        if held is not None:
            check_batch(engine, held)
        return is_ours or (held is not None and _differs(engine, held))
    if is_ours or (held is not None and _is_beyond(engine, held, part)):
        raise CheckpointError(
            f"load_checkpoint: a part of {path} (load_optimizer_states, load_module_only, custom_load_fn) is read by "
            "DeepSpeed, which cannot: it was saved by engine.save, or in another layout; load all "
            "of it, or give initialize a model with its weights (ds-dynatrain checkpoint convert)"
        )
    return False


def _differs(engine: EngineCore, held: ZeroFolder) -> bool:
    """Return whether a checkpoint of DeepSpeed's was divided differently from the current state: by another layout, or
    by other ZeRO settings (`ZeroRules`)."""
    try:
        if not _is_same_layout(engine, held):
            return True
        return (engine.layout.pipe > 1 and not _trains_alike(engine, held)) or _is_cut_anew(engine, held)
    except CheckpointError:
        return False  # our code cannot read it; DeepSpeed needs the same layout


def _is_beyond(engine: EngineCore, held: ZeroFolder, part: CheckpointPart) -> bool:
    """Return whether DeepSpeed would fail to read the requested part of its checkpoint, or would silently read nothing.

    DeepSpeed gathers the weights of stage 3 from the files of an equal number of ranks. If only `load_module_only` is
    set, it reads no weights of stage 3.
    """
    if part.load_optimizer_states and not part.load_module_only:
        return _differs(engine, held)
    is_gathered = not part.load_optimizer_states and _is_same_layout(engine, held)
    return 3 in (held.stage, engine.layout.zero_stage) and not is_gathered


def _is_same_layout(engine: EngineCore, held: ZeroFolder) -> bool:
    layout = engine.layout
    stage = 1 if engine.vps.rules.parts_without_zero and not layout.zero_stage else layout.zero_stage
    now = layout.data * layout.sequence, layout.pipe * layout.tensor, stage
    return (held.ranks, held.parts, held.stage) == now


def _is_cut_anew(engine: EngineCore, held: ZeroFolder) -> bool:
    """Return whether ranks held different parts of the state when the checkpoint was saved, for example because
    `round_robin_gradients` or `sub_group_size` was different."""
    layout, now = engine.layout, engine.vps
    if not layout.zero_stage:
        return False
    stock = layout.replace(order=None)
    before = VirtualParameterSpace(
        now.line, rules_then(held, now.rules), now.kinds, stock, now.members, now.partitioner
    )
    return any(_cut(before, stock, rank) != _cut(now, layout, rank) for rank in range(layout.world_size))


def _cut(space: VirtualParameterSpace, layout: Layout, rank: int) -> list[Any]:
    """Return the sizes of a rank's buffers, and the location of each range of its masters in them."""
    held = space.holding(layout, rank, MASTER)
    columns = held.start, held.stop, held.buffer, held.offset
    return [space.local(layout, rank).sizes(), *(column.tolist() for column in columns)]


def _trains_alike(engine: EngineCore, held: ZeroFolder) -> bool:
    """Return whether each pipeline stage trained the same tensors when the checkpoint was saved.

    The checkpoint does not record the boundaries of stages.
    """
    layout = engine.layout
    for stage in range(layout.pipe):
        there, local = held.shapes(stage), engine.vps.local(layout, layout.rank(pipe=stage))
        here = {each.name for each in local.tensors if each.trainable and each.numel}
        if there is not None and here != {name for table in there for name in table}:
            return False
    return True
