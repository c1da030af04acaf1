"""Restoration of all engines of a process from checkpoints of one boundary, which have the same tag in all folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.checkpoint import Saved
from ds_dynatrain.engine.checkpoints import restore
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.extension import backups_of
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Restored


def restore_all(
    engines: Sequence[EngineCore], proposals: Sequence[Proposal], worlds: Mapping[int, World]
) -> list[Restored]:
    """Restore all engines from the newest tag that all of their backups have; see `restore`.

    worlds: a map from each engine's number to its new world.

    Raises CheckpointError on all members if there is no such tag. In this case the engines hold no state.
    """
    paths = [found.path.absolute() for engine in engines if (found := backups_of(engine.job.extensions))]
    left_out: list[str] = []
    while True:
        with suppress(CheckpointDamaged):  # continue with the next older one, for all engines
            return _restored(engines, proposals, worlds, paths, left_out)


def _restored(
    engines: Sequence[EngineCore],
    proposals: Sequence[Proposal],
    worlds: Mapping[int, World],
    paths: Sequence[Path],
    left_out: list[str],
) -> list[Restored]:
    """Restore all engines from the tag that the first engine chooses."""
    found: list[Restored] = []

    def is_wanted(tag: str) -> bool:
        return tag == found[0].path.name if found else all(is_there(path / tag) for path in paths[1:])

    for engine, proposal, path in zip(engines, proposals, paths, strict=True):
        with PROCESS.turn(engine):
            where = proposal.layout, proposal.members, worlds[engine.job.number], path
            found.append(restore.restore(engine, *where, is_wanted, left_out))
    return found


def is_there(path: Path) -> bool:
    """Return whether a folder contains a whole checkpoint."""
    try:
        Saved.open(path)
    except CheckpointError:
        return False
    return True
