"""The state from which a job starts: `dynatrain.resume` names a folder with checkpoints of either format.

If all members that held the state are gone and the job is started again, it continues from its own newest backup, or
from the checkpoint in `dynatrain.resume`. If there is neither, the script starts from the beginning, as under stock
torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.config import ResumeConfig
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.extension import BACKUP_KEY, Backups, backups_of
from ds_dynatrain.membership.session import Session
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Restored

Load = Callable[[Path, str, bool], Restored]
"""Function (folder, tag, whether to trust pickles) that loads a checkpoint the way `engine.load` does."""


def first_state(engine: EngineCore, load: Load) -> Restored | None:
    """Load the first state on all working members of a starting job. Returns None if there is nothing to load.

    Raises CheckpointError on all members if the state cannot be loaded.
    """
    if engine.idle or PROCESS.membership.is_newcomer:
        return None
    settings, restores, found = engine.settings, PROCESS.membership.restores, None
    backups = backups_of(engine.job.extensions)
    if restores and backups is not None:
        found = _newest(engine, backups, load)
    if found is None and settings.resume is not None:
        found = resume(engine, settings.resume, load)
    if found is None and restores:
        logger.warning(
            "all members that held the state of this job are gone, and there is no checkpoint to go on from: the "
            "script starts again, with what it loads itself; with %s it would go on from its last one",
            BACKUP_KEY,
        )
    return found


def _newest(engine: EngineCore, backups: Backups, load: Load) -> Restored | None:
    """Load the newest whole backup, which rank 0 chooses. Returns None if there is none.

    All engines of a process load the tag that the first engine has loaded.
    """
    first, path, doing = PROCESS.engines[0], backups.path.absolute(), f"looking for a {backups.what}"
    session = Session(engine.control, "backups", engine.members, doing, is_patient=True)
    tags = session.first("tags", lambda: [saved.path.name for saved in folder.newest(path)], doing)
    for tag in tags if first is engine else [tag for tag in tags if tag == first.began_from]:
        with suppress(CheckpointDamaged):
            found = load(path, tag, False)
            engine.began_from = tag
            logger.warning("the members that held the state are gone; restored step %d from %s", found.step, found.path)
            return found
    return None


def resume(engine: EngineCore, settings: ResumeConfig, load: Load) -> Restored | None:
    """Load the configured checkpoint on all working members of a starting job. Returns None if the folder has none.

    Rank 0 finds the checkpoint, and the others follow. Raises CheckpointError on all members if a checkpoint exists but
    cannot be loaded, so that a job does not start from the beginning by mistake.
    """
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
    """Return the tag of the checkpoint to load; "" if there is none."""
    if wanted is not None or not (path / folder.LATEST).exists():
        return wanted or ""
    try:
        return folder.latest(path)
    except CheckpointError:
        return folder.LATEST  # not a tag: loading it fails in the same way on all members
