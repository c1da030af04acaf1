"""`engine.load_checkpoint`: which checkpoints DeepSpeed reads itself, and which are read here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.checkpoint.others import ZeroFolder, is_zero_folder
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.errors import CheckpointError


class Part(NamedTuple):
    """What of a checkpoint DeepSpeed's `load_checkpoint` is asked for, in its order; all of the state by default."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the state; not strict, without the frozen weights that it was saved without."""
        return self._replace(load_module_strict=True) == Part()


def is_for_us(
    engine: EngineCore,
    key: str,
    load_dir: Any,
    tag: Any,
    part: Part,
    trust_pickle: bool,
) -> bool:
    """Whether a checkpoint is one of ours, or one of DeepSpeed's that was saved in another layout.

    A part of the state is left to DeepSpeed. Rank 0 looks, and tells all working members: what follows is a matter of
    all. key: of nothing else on the notice board. CheckpointError, on all alike, if it cannot be told.
    """
    if not part.is_whole or engine.deepspeed.load_universal_checkpoint():
        return False
    session = Session(engine.control, key, engine.members, "load_checkpoint", is_patient=True)
    return session.first(
        "is_for_us", lambda: _is_read_here(engine, load_dir, tag, trust_pickle), "looking at a checkpoint"
    )


def _is_read_here(engine: EngineCore, load_dir: Any, tag: Any, trust_pickle: bool) -> bool:
    try:
        path = Path(load_dir) / (folder.latest(Path(load_dir)) if tag is None else str(tag))
    except CheckpointError:
        return False  # DeepSpeed has words for it
    if (path / RECORD).is_file():
        return True
    return is_zero_folder(path) and _differs(engine, path, trust_pickle)


def _differs(engine: EngineCore, path: Path, trust_pickle: bool) -> bool:
    """Whether the layout that was saved is another one, as far as DeepSpeed's files know of layouts."""
    layout = engine.layout
    try:
        held = ZeroFolder.open(path, trust_pickle)
        if (held.ranks, held.parts) != (layout.data * layout.sequence, layout.pipe * layout.tensor):
            return True
        stage = 1 if engine.vps.rules.parts_without_zero and not layout.zero_stage else layout.zero_stage
        return held.stage != stage or (layout.pipe > 1 and not _trains_alike(engine, held))
    except CheckpointError:
        return False  # experts, or content that is not read here: it has to be the same layout


def _trains_alike(engine: EngineCore, held: ZeroFolder) -> bool:
    """Whether each stage trained then what it trains now: boundaries are noted nowhere."""
    layout = engine.layout
    for stage in range(layout.pipe):
        there, local = held.shapes(stage), engine.vps.local(layout, layout.rank(pipe=stage))
        here = {each.name for each in local.tensors if each.trainable and each.numel}
        if there is not None and here != {name for table in there for name in table}:
            return False
    return True
