"""`dynatrain.resume`: a job goes on from the latest checkpoint of a folder, of either format, or begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.config import ResumeConfig
from ds_dynatrain.engine.checkpoints.restoration import Restored
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger

Load = Callable[[Path, str, bool], Restored]
"""Folder, tag, and whether pickles are trusted; as `engine.load`."""


def resume(engine: EngineCore, settings: ResumeConfig, load: Load) -> Restored | None:
    """Load on all working members of a job that starts; None if there is nothing in the folder.

    Rank 0 looks, and the others do as it says. CheckpointError, on all members alike, for a checkpoint that is there
    and cannot be loaded: a job does not begin anew by mistake.
    """
    if engine.idle or PROCESS.membership.is_newcomer:
        return None
    path, doing = Path(settings.path).absolute(), "looking for a checkpoint to go on from"
    session = Session(engine.control, "resume", engine.members, doing, is_patient=True)
    tag = session.first("tag", lambda: _tag(path, settings.tag), doing)
    if not tag:
        if engine.rank == 0:
            logger.info("resume: %s names no checkpoint; training begins", path)
        return None
    found = load(path, tag, settings.trust_pickle)
    if engine.rank == 0:
        logger.info("resume: step %d of %s", found.step, found.path)
    return found


def _tag(path: Path, wanted: str | None) -> str:
    """The tag to load; empty if there is none."""
    if wanted is not None or not (path / folder.LATEST).exists():
        return wanted or ""
    try:
        return folder.latest(path)
    except CheckpointError:
        return folder.LATEST  # no name of a checkpoint: all members say so when they load it
