"""Restoration from a checkpoint into running processes: `engine.load`, and `restore` for members whose state is lost.

Both are one transaction (see `restoration`), like a switch whose source is the checkpoint. Each member fills new
buffers with its own byte ranges. Digests over all members must equal those of the checkpoint before anything in the
engine is changed. Then the optimizer is rebuilt over the new buffers, the extra state is loaded, and the outcome is
recorded once. `engine.load` keeps the old state until the outcome is recorded and goes back to it on failure; `restore`
has no state to go back to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.checkpoint import folder
from ds_dynatrain.checkpoint.others.zero_files import is_zero_folder
from ds_dynatrain.checkpoint.record import RECORD, Saved
from ds_dynatrain.engine.checkpoints.other_tools import opened
from ds_dynatrain.engine.checkpoints.saving import ask
from ds_dynatrain.engine.checkpoints.sources import ALL, CheckpointPart
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.extension import BACKUP_KEY, Backups, backups_of
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session, VoteResult
from ds_dynatrain.records import to_record
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Goal, Restoration, Restored, let_go
from ds_dynatrain.reshard.swap import Before
from ds_dynatrain.space import Layout

# ---- load and restore ------------------------------------------------------------------------------------------------


def load(engine: EngineCore, where: Path, tag: str | None, place: str, is_open: str, part: CheckpointPart) -> Restored:
    """Load a checkpoint; see `DynatrainEngine.load`. A load uses up a generation number, as a switch does.

    place: a name for this call, unique in the job's key-value store.
    is_open: a description of what prevents the load on this member; "" if nothing does.
    part: the part of the checkpoint to load.
    """
    control, members, generation, key = engine.control, engine.members, engine.attempt, f"load/{place}"
    in_the_way = is_open and f"{is_open}: load after engine.step(), with no switch pending"
    ask(Session(control, key, members, "engine.load"), engine, where, tag, in_the_way)
    same = (engine.layout, members, engine.layout, members, None)
    control.decide(f"proposal/{generation}", to_record(Proposal(generation, *same)))  # idle members count it
    if engine.world is None:
        raise RuntimeError("an idle member has nothing to load")
    goal = Goal(engine.layout, members, engine.world, key, f"record/{generation}")
    found = _chosen(engine, goal, lambda: _named(where, tag))
    return restored(engine, goal, found, Before.of(engine, has_rest=True), part)


def restore_all(
    engines: Sequence[EngineCore], proposals: Sequence[Proposal], worlds: Mapping[int, World]
) -> list[Restored]:
    """Restore all engines of a process from their backup checkpoints with the newest tag that all of them have; see
    `restore`.

    worlds: a map from each engine's number to its new world.

    Raises CheckpointError on all members if there is no such tag. In this case the engines hold no state.
    """
    paths = [each.path.absolute() for engine in engines if (each := backups_of(engine.job.extensions))]
    left_out, found = list[str](), list[Restored]()

    def is_wanted(tag: str) -> bool:
        return tag == found[0].path.name if found else all(is_there(path / tag) for path in paths[1:])

    while len(found) < len(engines):
        found.clear()
        with suppress(CheckpointDamaged):  # continue with the next older one, for all engines
            for engine, proposal, path in zip(engines, proposals, paths, strict=True):
                with PROCESS.turn(engine):
                    where = proposal.layout, proposal.members, worlds[engine.job.number], path
                    found.append(restore(engine, *where, left_out, is_wanted))
    return found


def restore(
    engine: EngineCore,
    layout: Layout,
    members: tuple[int, ...],
    world: World,
    path: Path,
    left_out: list[str],
    is_wanted: Callable[[str], bool] = lambda tag: True,
) -> Restored:
    """Restore everything from the newest complete checkpoint in a folder, in a world that was just built.

    Call it after a failure, on the main thread of every member in `members`, including members that were idle or have
    just joined. All of them must share `engine.control`. Unfinished global batches are discarded, and loaders may be at
    any position. No state of the members is used: an attached optimizer is detached, without a message to any member.
    Groups of an old world are neither used nor shut down: abort them before this call, and drop them after it.

    members: the member at each rank of `layout`.
    world: this member's world, built by `adapters.worlds.build_world` for the layout and members, with a generation
        number that was never used. It must be connected, and is installed here.
    left_out: tags that are known to be damaged.
    is_wanted: returns whether a tag is acceptable; called on rank 0.

    After this call the engine is in `world`, with all state, counters, hyper-parameters, random streams and loader
    positions of the checkpoint; `engine.global_steps` has the checkpoint's step.

    Raises CheckpointError on all members if no checkpoint is complete, none fits the model, or a member does not take
    part, and CheckpointDamaged for a damaged one, which is added to `left_out`. In this case the engine holds no state
    and no world (`engine.idle`). Raises MemberMissing if rank 0 does not take part.
    """
    let_go(engine)
    key = f"restore/{world.generation}/{len(left_out)}"
    goal = Goal(layout, members, world, key, f"{key}/record")
    found = _chosen(engine, goal, lambda: _newest(path.absolute(), left_out, is_wanted))
    try:
        return restored(engine, goal, found)
    except CheckpointDamaged:
        left_out.append(found.name)
        raise


def restored(
    engine: EngineCore,
    goal: Goal,
    path: Path,
    old: Before | None = None,
    part: CheckpointPart = ALL,
) -> Restored:
    """Restore everything from a given checkpoint, and return a description of the checkpoint.

    old: the state to go back to on failure; None if members have already released theirs.

    Raises CheckpointError on all members if the restoration fails, and CheckpointDamaged for a damaged checkpoint. In
    both cases the engine is unchanged.
    """
    present = None if old is None else old.shared
    opener = partial(opened, engine, goal, path, present, part)
    restoration = Restoration(engine, goal, opener, str(path), old)
    restoration.run()
    return Restored(path, engine.global_steps, restoration.client_state, restoration.kinds, restoration.digest)


def _named(where: Path, tag: str | None) -> Path:
    """Return the path of the checkpoint with a tag or, without a tag, of the latest one. The checkpoint may be in our
    format or in DeepSpeed's.

    Raises CheckpointError if there is none.
    """
    path = where / (folder.latest(where) if tag is None else tag)
    return path if is_zero_folder(path) and not (path / RECORD).is_file() else Saved.open(path).path


def _newest(where: Path, left_out: list[str], is_wanted: Callable[[str], bool]) -> Path:
    for saved in folder.newest(where):
        is_whole = not saved.record.converted_from  # a converted one lacks parts of a training
        if saved.path.name not in left_out and is_whole and is_wanted(saved.path.name):
            return saved.path
    passed = f"; damaged: {', '.join(left_out)}" if left_out else ""
    raise CheckpointError(f"there is no whole checkpoint in {where}{passed}; give a folder that engine.save wrote into")


def is_there(path: Path) -> bool:
    """Return whether a folder contains a complete checkpoint."""
    try:
        Saved.open(path)
    except CheckpointError:
        return False
    return True


def _chosen(engine: EngineCore, goal: Goal, find: Callable[[], Path]) -> Path:
    """Find a checkpoint on rank 0, and return its path on all members. Raises CheckpointError on all members if rank 0
    finds none."""
    session = goal.session(engine.control)
    try:
        return Path(session.first("chosen", lambda: str(find()), "choosing a checkpoint"))
    except CheckpointError as error:
        session.decide(VoteResult(False, str(error)))
        raise


# ---- the state from which a job starts -------------------------------------------------------------------------------

Load = Callable[[Path, str, CheckpointPart], Restored]
"""Function (folder, tag, part) that loads a checkpoint in the same way as `engine.load`."""


def first_state(engine: EngineCore, load: Load) -> Restored | None:
    """Load the first state of a starting job on all working members. Returns None if there is nothing to load.

    If a job is started again because all members that held the state are gone, it continues from its own newest backup
    checkpoint, or from the checkpoint in `dynatrain.resume`. If there is neither, the script starts from the beginning,
    as under stock torchrun.

    Raises CheckpointError on all members if a checkpoint exists but cannot be loaded, so that a job does not start from
    the beginning by mistake.
    """
    if engine.idle or PROCESS.membership.is_newcomer:
        return None
    settings, restores, found = engine.settings.resume, PROCESS.membership.restores, None
    backups = backups_of(engine.job.extensions)
    if restores and backups is not None:
        found = _newest_backup(engine, backups, load)
    if found is None and settings is not None:
        path, doing = Path(settings.path).absolute(), "looking for a checkpoint to go on from"
        session = Session(engine.control, "resume", engine.members, doing, is_patient=True)
        tag = session.first("tag", lambda: _tag(path, settings.tag), doing)
        found = load(path, tag, ALL._replace(trust_pickle=settings.trust_pickle)) if tag else None
        if engine.rank == 0:
            said = f"{path} names no checkpoint; training begins" if found is None else f"step {found.step} of {path}"
            logger.info("resume: %s", said)
    if found is None and restores:
        logger.warning(
            "all members that held the state of this job are gone, and there is no checkpoint to go on from: the "
            "script starts again, with what it loads itself; with %s it would go on from its last one",
            BACKUP_KEY,
        )
    return found


def _newest_backup(engine: EngineCore, backups: Backups, load: Load) -> Restored | None:
    """Load the newest complete backup checkpoint, which rank 0 chooses. Returns None if there is none.

    If a process has several engines, the first one chooses the tag, and the others load the same tag.
    """
    first, path, doing = PROCESS.engines[0], backups.path.absolute(), f"looking for a {backups.what}"
    session = Session(engine.control, "backups", engine.members, doing, is_patient=True)
    tags = session.first("tags", lambda: [saved.path.name for saved in folder.newest(path)], doing)
    for tag in tags if first is engine else [tag for tag in tags if tag == first.began_from]:
        with suppress(CheckpointDamaged):
            found = load(path, tag, ALL)
            engine.began_from = tag
            logger.warning("the members that held the state are gone; restored step %d from %s", found.step, found.path)
            return found
    return None


def _tag(path: Path, wanted: str | None) -> str:
    """Return the tag of the checkpoint to load: `wanted` if it is given, or else the latest one in the folder; "" if
    there is none."""
    if wanted is not None or not (path / folder.LATEST).exists():
        return wanted or ""
    try:
        return folder.latest(path)
    except CheckpointError:
        return folder.LATEST  # not a tag: loading it fails in the same way on all members
