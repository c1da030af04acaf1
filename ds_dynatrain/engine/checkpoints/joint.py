"""Joint checkpoints: the fallback checkpoints of all engines of a process are saved and restored together.

The engines share one history. So checkpoints of one boundary have one tag, each engine's in a folder of its own;
nothing is restored from a tag that one of the folders lacks, and no complete one is removed before there are enough
newer ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ds_dynatrain.adapters.world import World
from ds_dynatrain.checkpoint import Saved, folder
from ds_dynatrain.engine.checkpoints import restore
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Restored


def restore_all(
    engines: Sequence[EngineCore], proposals: Sequence[Proposal], worlds: Mapping[int, World]
) -> list[Restored]:
    """Restore all engines from the newest joint checkpoint; see `restore`. worlds: by the engine's number.

    Raise CheckpointError, on all members alike, if there is none; the engines then hold nothing.
    """
    paths = [folder_of(engine) for engine in engines]
    if len(engines) == 1:
        proposal = proposals[0]
        where = proposal.layout, proposal.members, worlds[engines[0].job.number], paths[0]
        return [restore.restore(engines[0], *where)]
    left_out: list[str] = []
    while True:
        with suppress(CheckpointDamaged):  # then the next older one, for all of them
            return _restored(engines, proposals, worlds, paths, left_out)


def _restored(
    engines: Sequence[EngineCore],
    proposals: Sequence[Proposal],
    worlds: Mapping[int, World],
    paths: Sequence[Path],
    left_out: list[str],
) -> list[Restored]:
    """Restore all engines from one tag, which the first engine chooses."""
    found: list[Restored] = []

    def is_wanted(tag: str) -> bool:
        return tag == found[0].path.name if found else all(_is_there(path / tag) for path in paths[1:])

    for engine, proposal, path in zip(engines, proposals, paths, strict=True):
        with PROCESS.turn(engine):
            where = proposal.layout, proposal.members, worlds[engine.job.number], path
            found.append(restore.restore(engine, *where, is_wanted, left_out))
    return found


def next_tag(engines: Sequence[EngineCore], keep: int, key: str) -> str:
    """Return the tag of the next joint checkpoint, free in all folders; rank 0 of the first engine chooses it.

    keep: how many joint checkpoints stay; older ones are removed. key: unique on the first engine's board. Raise
    CheckpointError, on all members alike, if the folders cannot be read or written.
    """
    engine = engines[0]

    def chosen() -> str:
        folders = [folder_of(one) for one in engines]
        _forget_old(folders, keep)
        return free_in_all(folders, f"step{engine.global_steps}")

    session = Session(engine.control, key, engine.members, "naming a checkpoint", is_patient=True)
    return session.first("tag", chosen, "naming a checkpoint")


def joint_tags(folders: Sequence[Path]) -> list[str]:
    """Return the tags that all folders have, newest first."""
    return [tag for tag in folder.tags(folders[0]) if all(_is_there(path / tag) for path in folders)]


def free_in_all(folders: Sequence[Path], wanted: str) -> str:
    """Return the wanted tag, with a number appended if one of the folders has it."""
    taken, tag = "", wanted
    while tag != taken:
        taken = tag
        for path in folders:
            tag = folder.free_tag(path, tag)
    return tag


def _forget_old(folders: Sequence[Path], keep: int) -> None:
    kept = joint_tags(folders)[:keep]
    for path in folders if len(kept) == keep else ():
        tags = folder.tags(path)
        for old in tags[tags.index(kept[-1]) + 1 :]:
            folder.remove(path, old)


def folder_of(engine: EngineCore) -> Path:
    """Return the folder of an engine's fallback checkpoints; CheckpointError if it has none."""
    settings = engine.settings.fallback
    if settings is None:
        raise CheckpointError(
            f"engine {engine.job.number} has no dynatrain.fallback.path; give each engine of the process one"
        )
    return Path(settings.path).absolute()


def _is_there(path: Path) -> bool:
    try:
        Saved.open(path)
    except CheckpointError:
        return False
    return True
