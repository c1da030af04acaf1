"""Restoration from a checkpoint into running processes: `engine.load`, and `restore` for members whose state is gone.

Both are one transaction (see `restoration`), like a switch whose source is the checkpoint. Each member fills new
buffers with its own byte ranges. Digests over all members must equal those of the checkpoint before anything in the
engine is changed. After this check the optimizer is rebuilt over the new buffers, the extra state is taken over, and
the outcome is recorded once. `engine.load` keeps the old state until the outcome is recorded and goes back to it on
failure; `restore` has no state to go back to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.checkpoint import Saved, folder
from ds_dynatrain.checkpoint.files import naming
from ds_dynatrain.checkpoint.others import is_zero_folder
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints.asking import ask
from ds_dynatrain.engine.checkpoints.other_tools import opened
from ds_dynatrain.engine.checkpoints.sources import ALL, CheckpointPart
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session, VoteResult
from ds_dynatrain.records import to_record
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.restoration import Goal, Restoration, Restored, StateSource, let_go
from ds_dynatrain.reshard.swap import Before
from ds_dynatrain.space import Layout


@contextmanager
def from_checkpoint(
    engine: EngineCore, goal: Goal, path: Path, present: dict[str, Any] | None, trust_pickle: bool, part: CheckpointPart
) -> Iterator[StateSource]:
    """Context manager that opens the checkpoint in a folder as a source of state, and names the folder in errors.

    See `other_tools.opened` for the arguments.
    """
    with naming(path), opened(path, engine, goal, present, part, trust_pickle) as source:
        yield source


# ---- the calls -------------------------------------------------------------------------------------------------------


def load(
    engine: EngineCore,
    path: str | os.PathLike[str],
    tag: str | None,
    place: str,
    generation: int,
    is_open: str,
    trust_pickle: bool = False,
    part: CheckpointPart = ALL,
) -> Restored:
    """Load a checkpoint; see `DynatrainEngine.load`.

    generation: the number that the load uses up, the same way as a switch does.
    place: see `regrouping.register`.
    is_open: see `regrouping.register`.
    part: see `from_checkpoint`.
    """
    control, members, where = engine.control, engine.members, Path(path).absolute()
    in_the_way = is_open and f"{is_open}: load after engine.step(), with no switch pending"
    ask(Session(control, f"load/{place}", members, "engine.load"), engine, where, tag, in_the_way)
    same = (engine.layout, members, engine.layout, members, None)
    control.decide(f"proposal/{generation}", to_record(Proposal(generation, *same)))  # idle members follow the count
    if engine.world is None:
        raise RuntimeError("an idle member has nothing to load")
    goal = Goal(engine.layout, members, engine.world, f"load/{place}", f"record/{generation}")
    found = _chosen(engine, goal, lambda: _named(where, tag))
    return restored(engine, goal, found, Before.of(engine, has_rest=True), trust_pickle, part)


def restore(
    engine: EngineCore,
    layout: Layout,
    members: tuple[int, ...],
    world: World,
    path: str | os.PathLike[str],
    is_wanted: Callable[[str], bool] = lambda tag: True,
    left_out: list[str] | None = None,
) -> Restored:
    """Restore everything from the newest whole checkpoint in a folder, in a world that was just built.

    Call it after a failure, on the main thread of every member in `members`, including members that were idle or have
    just joined. All of them must share `engine.control`. Open accumulation windows are discarded, and loaders may be at
    any position. No state of the members is used: an attached optimizer is detached, without a message to any member.
    Groups of an old world are neither used nor shut down: abort them before this call, and drop them after it.

    members: the member at each rank of `layout`.
    world: this member's world, built by `adapters.worlds.build_world` for the layout and members, with a generation
        number that was never used. It must be connected, and is installed here.
    is_wanted: returns whether a tag is acceptable; called on rank 0.
    left_out: tags that are known to be damaged. If given, a further damaged checkpoint is added to it and raises
        CheckpointDamaged on all members. If not given, all members skip a damaged checkpoint and use the next older
        one.

    After this call the engine is in `world`, with all state, counters, hyper-parameters, random streams and loader
    positions of the checkpoint; `engine.global_steps` has the checkpoint's step.

    Raises CheckpointError on all members if no checkpoint is whole, none fits the model, or a member does not take
    part. In this case the engine holds no state and no world (`engine.idle`). Raises MemberMissing if rank 0 does not
    take part.
    """
    where, known = Path(path).absolute(), list(left_out or ())
    let_go(engine)
    while True:
        key = f"restore/{world.generation}/{len(known)}"
        goal = Goal(layout, members, world, key, f"{key}/record")
        found = _chosen(engine, goal, lambda: _newest(where, known, is_wanted).path)
        try:
            return restored(engine, goal, found)
        except CheckpointDamaged:
            if left_out is not None:
                left_out.append(found.name)
                raise
            known.append(found.name)


def restored(
    engine: EngineCore,
    goal: Goal,
    path: Path,
    old: Before | None = None,
    trust_pickle: bool = False,
    part: CheckpointPart = ALL,
) -> Restored:
    """Restore everything from one given checkpoint.

    old: the state to go back to on failure; None if members have already released theirs.

    Raises CheckpointError on all members if restoration fails, and CheckpointDamaged for a damaged checkpoint. In both
    cases the engine is unchanged.
    """
    present = None if old is None else old.shared
    opener = partial(from_checkpoint, engine, goal, path, present, trust_pickle, part)
    restoration = Restoration(engine, goal, opener, str(path), old)
    restoration.run()
    return Restored(path, engine.global_steps, restoration.client_state, restoration.kinds, restoration.digest)


def _named(where: Path, tag: str | None) -> Path:
    """Return the path of the checkpoint with this tag, or of the latest one, in our format or DeepSpeed's.

    Raises CheckpointError if there is none.
    """
    path = where / (folder.latest(where) if tag is None else tag)
    return path if is_zero_folder(path) and not (path / RECORD).is_file() else Saved.open(path).path


def _newest(where: Path, left_out: list[str], is_wanted: Callable[[str], bool]) -> Saved:
    for saved in folder.newest(where):
        is_whole = not saved.record.converted_from  # a converted one lacks parts of a training
        if saved.path.name not in left_out and is_whole and is_wanted(saved.path.name):
            return saved
    passed = f"; damaged: {', '.join(left_out)}" if left_out else ""
    raise CheckpointError(f"there is no whole checkpoint in {where}{passed}; give a folder that engine.save wrote into")


def _chosen(engine: EngineCore, goal: Goal, find: Callable[[], Path]) -> Path:
    """Return the checkpoint that rank 0 finds. Raises CheckpointError on all members if rank 0 finds none."""
    session = goal.session(engine.control)
    try:
        return Path(session.first("chosen", lambda: str(find()), "choosing a checkpoint"))
    except CheckpointError as error:
        session.decide(VoteResult(False, str(error)))
        raise
