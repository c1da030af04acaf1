"""Joint checkpoints: those of all engines of a process, saved together between two steps under one tag.

Each engine has its own folder. A tag is restored only if all folders have it, and a complete checkpoint is removed only
once there are enough newer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.engine.checkpoints.restore import is_there
from ds_dynatrain.membership.session import Session
from ds_dynatrain.reshard.core import EngineCore


def next_tag(engine: EngineCore, folders: Sequence[Path], keep: int, key: str) -> str:
    """Return the tag of the next joint checkpoint, unused in all folders. Rank 0 of the first engine chooses it.

    engine: the first engine of the process.
    keep: how many joint checkpoints stay; older ones are removed.
    key: a key that is used only once on the engine's board.

    Raises CheckpointError on all members if the folders cannot be read or written.
    """

    def chosen() -> str:
        forget_old(folders, keep)
        return free_in_all(folders, f"step{engine.global_steps}")

    session = Session(engine.control, key, engine.members, "naming a checkpoint", is_patient=True)
    return session.first("tag", chosen, "naming a checkpoint")


def joint_tags(folders: Sequence[Path]) -> list[str]:
    """Return the tags that all folders have, newest first."""
    return [tag for tag in folder.tags(folders[0]) if all(is_there(path / tag) for path in folders)]


def free_in_all(folders: Sequence[Path], wanted: str) -> str:
    """Return `wanted` as a tag for a new checkpoint, with a number appended if one of the folders already has it."""
    taken, tag = "", wanted
    while tag != taken:
        taken = tag
        for path in folders:
            tag = folder.free_tag(path, tag)
    return tag


def forget_old(folders: Sequence[Path], keep: int) -> None:
    """Remove all checkpoints that are older than the newest `keep` joint ones, which are in all folders. Remove none if
    there are fewer joint ones.
    """
    kept = joint_tags(folders)[:keep]
    for path in folders if len(kept) == keep else ():
        tags = folder.tags(path)
        for old in tags[tags.index(kept[-1]) + 1 :]:
            folder.remove(path, old)
