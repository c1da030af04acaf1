"""Choice for `engine.load_checkpoint`: whether DeepSpeed reads a checkpoint itself, or our code reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.checkpoint.others import ZeroFolder, rules_then
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints.other_tools import check_batch
from ds_dynatrain.engine.checkpoints.sources import CheckpointPart
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.membership.session import Session
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import MASTER, VirtualParameterSpace

EXPERT_SIZE = "ds_dynatrain_expert_size.json"
"""File among DeepSpeed's with the expert size, which these do not state. DeepSpeed reads masters and optimizer states
of experts by rank, so at another size it would give them to other experts."""


def note_experts(engine: EngineCore, save_dir: str, tag: str | None) -> None:
    """Write the expert size into the folder of the checkpoint that DeepSpeed is about to save."""
    if engine.rank == 0 and any(each.expert for each in engine.vps.tensors):
        path = Path(save_dir) / (f"global_step{engine.global_steps}" if tag is None else str(tag))
        path.mkdir(parents=True, exist_ok=True)
        (path / EXPERT_SIZE).write_text(json.dumps(engine.layout.expert), encoding="utf-8")


def is_for_us(
    engine: EngineCore,
    key: str,
    load_dir: Any,
    tag: Any,
    part: CheckpointPart,
    trust_pickle: bool,
) -> bool:
    """Return whether our code reads a checkpoint: one in our format, or one of DeepSpeed's that its own call may not
    read.

    Rank 0 decides and informs all working members, which must act the same.

    key: a key that is unique in the job's key-value store.

    Raises CheckpointError on all members if no decision is possible, or if only weights are requested and DeepSpeed
    would not read them.
    """
    if engine.deepspeed.load_universal_checkpoint():
        return False
    session = Session(engine.control, key, engine.members, "load_checkpoint", is_patient=True)
    return session.first(
        "is_for_us", lambda: _is_read_here(engine, load_dir, tag, part, trust_pickle), "looking at a checkpoint"
    )


def _is_read_here(engine: EngineCore, load_dir: Any, tag: Any, part: CheckpointPart, trust_pickle: bool) -> bool:
    try:
        path = Path(load_dir) / (folder.latest(Path(load_dir)) if tag is None else str(tag))
    except CheckpointError:
        return False  # DeepSpeed raises its own error
    is_ours = (path / RECORD).is_file()
    if not is_ours and part.load_optimizer_states and not part.load_module_only:
        _check_expert_size(engine, path)
    held = None if is_ours else _opened(path, trust_pickle)
    if part.is_read_here and held is not None:
        check_batch(engine, held)
    if part.is_read_here:
        return is_ours or (held is not None and _differs(engine, held))
    if is_ours or (held is not None and _is_beyond(engine, held, part)):
        raise CheckpointError(
            f"load_checkpoint: a part of {path} (load_optimizer_states, load_module_only, custom_load_fn) is read by "
            "DeepSpeed, which cannot: it was saved by engine.save, or in another layout; load all "
            "of it, or give initialize a model with its weights (ds-dynatrain checkpoint convert)"
        )
    return False


def _check_expert_size(engine: EngineCore, path: Path) -> None:
    """Raise CheckpointError if a checkpoint of DeepSpeed's says that it was saved with another expert size."""
    said = path / EXPERT_SIZE
    size = json.loads(said.read_text(encoding="utf-8")) if said.is_file() else engine.layout.expert
    if size != engine.layout.expert:
        raise CheckpointError(
            f"load_checkpoint: {path} was saved with expert={size}, and this layout has expert={engine.layout.expert}: "
            f"DeepSpeed would give experts each other's masters and moments; call engine.switch(expert={size}) first, "
            "or load a checkpoint of engine.save, which loads into any layout"
        )


def _opened(path: Path, trust_pickle: bool) -> ZeroFolder | None:
    """Open a checkpoint of DeepSpeed's. Returns None if it is not one, or has experts or other content that our code
    cannot read."""
    try:
        return ZeroFolder.open(path, trust_pickle)
    except CheckpointError:
        return None


def _differs(engine: EngineCore, held: ZeroFolder) -> bool:
    """Return whether a checkpoint was divided differently: by another layout, or by other ZeRO settings
    (`ZeroRules`)."""
    try:
        if not _is_same_layout(engine, held):
            return True
        return (engine.layout.pipe > 1 and not _trains_alike(engine, held)) or _is_cut_anew(engine, held)
    except CheckpointError:
        return False  # content that our code cannot read: DeepSpeed needs the same layout


def _is_beyond(engine: EngineCore, held: ZeroFolder, part: CheckpointPart) -> bool:
    """Return whether DeepSpeed would fail to read this part of a checkpoint, or read nothing.

    DeepSpeed gathers the weights of stage 3 from files of an equal number of ranks, and reads none if only
    `load_module_only` is set.
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
    """Return whether ranks held different parts than now, as with another `round_robin_gradients` or
    `sub_group_size`."""
    layout, now = engine.layout, engine.vps
    if not layout.zero_stage:
        return False
    rules = rules_then(held, now.rules)
    stock = layout.replace(order=None)
    before = VirtualParameterSpace(now.line, rules, now.kinds, stock, now.members, now.partitioner)
    for rank in range(layout.world_size):
        one, other = before.holding(stock, rank, MASTER), now.holding(layout, rank, MASTER)
        pairs = (one.start, other.start), (one.stop, other.stop), (one.buffer, other.buffer), (one.offset, other.offset)
        is_sized_alike = before.local(stock, rank).sizes() == now.local(layout, rank).sizes()
        if not is_sized_alike or not all(np.array_equal(*pair) for pair in pairs):
            return True
    return False


def _trains_alike(engine: EngineCore, held: ZeroFolder) -> bool:
    """Return whether each stage trained the same tensors as now.

    The checkpoint does not record the boundaries of stages.
    """
    layout = engine.layout
    for stage in range(layout.pipe):
        there, local = held.shapes(stage), engine.vps.local(layout, layout.rank(pipe=stage))
        here = {each.name for each in local.tensors if each.trainable and each.numel}
        if there is not None and here != {name for table in there for name in table}:
            return False
    return True
