"""From a checkpoint into living processes: `engine.load`, and `restore` for members whose state is gone.

Both are one transaction (`restoration`), like a switch whose source is the checkpoint. Each member fills new buffers
with its own byte ranges; digests over all members must be those of the checkpoint before anything of the engine is
touched; then the optimizer is put over the new buffers, the carry taken over, and the outcome written once.
`engine.load` keeps the old state until then and goes back to it; `restore` has none to go back to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ds_dynatrain.adapters.world import World
from ds_dynatrain.checkpoint import Saved, folder
from ds_dynatrain.checkpoint.others import is_zero_folder
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints.asking import ask, refusal_of
from ds_dynatrain.engine.checkpoints.from_checkpoint import ALL, Part, from_checkpoint
from ds_dynatrain.engine.checkpoints.restoration import Goal, Old, Restoration, Restored
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.proposal import Proposal
from ds_dynatrain.engine.transaction.session import Decision, Request, Session
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.records import to_record
from ds_dynatrain.space import Layout


def load(
    engine: EngineCore,
    path: str | os.PathLike[str],
    tag: str | None,
    place: str,
    generation: int,
    is_open: str,
    trust_pickle: bool = False,
    part: Part = ALL,
) -> Restored:
    """See `DynatrainEngine.load`. generation: the number that the load uses up, as a switch does.

    place, is_open: as for `registration.register`. part: as for `from_checkpoint`.
    """
    control, members, where = engine.control, engine.members, Path(path).absolute()
    request = Request(
        {"folder": str(where), "tag": tag, "step": engine.global_steps},
        refusal_of(engine, is_open and f"{is_open}: load after engine.step(), with no switch pending", tag),
    )
    ask(Session(control, f"load/{place}", members, "engine.load"), request)
    same = (engine.layout, members, engine.layout, members, None)
    control.decide(f"proposal/{generation}", to_record(Proposal(generation, *same)))  # idle members count along
    if engine.world is None:
        raise RuntimeError("an idle member has nothing to load")
    goal = Goal(engine.layout, members, engine.world, f"load/{place}", f"record/{generation}")
    found = _chosen(engine, goal, lambda: _named(where, tag))
    return _restored(engine, goal, found, Old.of(engine), trust_pickle, part)


def restore(
    engine: EngineCore,
    layout: Layout,
    members: tuple[int, ...],
    world: World,
    path: str | os.PathLike[str],
    is_wanted: Callable[[str], bool] = lambda tag: True,
    left_out: list[str] | None = None,
) -> Restored:
    """Restore everything from the newest whole checkpoint in a folder, in a world that was built just now.

    For a failure path. Call it on the main thread of every member in `members`, which has the member at each rank of
    `layout`; no accumulation window counts any more, and loaders may stand anywhere. `world` is this member's, from
    `adapters.worlds.build_world` for (layout, members) and a generation that was never used, connected; it is installed
    here. Nothing of what members hold is used: where an optimizer is on it comes off, without a message to anybody, and
    members that were idle or have just joined are called alike. Groups of an old world are neither used nor taken
    down: abort them before, drop them after. All members must share `engine.control`.

    Afterwards the engine is in `world` with all state, counters, hyper-parameters, random streams and loaders'
    positions of the checkpoint; `engine.global_steps` says where that is. A checkpoint that turns out to be damaged is
    passed over for the next older one, by all members alike. is_wanted: whether one of that tag will do, asked on rank
    0. left_out: damaged ones that are known; with it, another one is the end: CheckpointDamaged on all members alike.

    CheckpointError, on all members alike, if none is whole, none fits the model, or a member does not take part: the
    engine then holds no state and no world (`engine.idle`), and `world` stays installed. MemberMissing if it is rank 0
    that does not take part.
    """
    where, known = Path(path).absolute(), list(left_out or ())
    let_go(engine)
    while True:
        key = f"restore/{world.generation}/{len(known)}"
        goal = Goal(layout, members, world, key, f"{key}/record")
        found = _chosen(engine, goal, lambda: _newest(where, known, is_wanted).path)
        try:
            return _restored(engine, goal, found)
        except CheckpointDamaged:
            if left_out is not None:
                left_out.append(found.name)
                raise
            known.append(found.name)


def take_back(
    engine: EngineCore,
    layout: Layout,
    members: tuple[int, ...],
    world: World,
    path: str | os.PathLike[str],
    record: str,
    enter: Callable[[], None],
) -> Restored:
    """Restore everything from this very checkpoint, on members that have let go of what they held.

    As `restore`, but the outcome is written to `record` on the board, `enter` makes the engine part of its
    world, and a damaged checkpoint is the end. CheckpointError, on all members alike, if it cannot be: the engine is
    then as empty as before.
    """
    goal = Goal(layout, members, world, f"{record}/restore", record, enter)
    return _restored(engine, goal, Path(path))


def _restored(
    engine: EngineCore,
    goal: Goal,
    path: Path,
    old: Old | None = None,
    trust_pickle: bool = False,
    part: Part = ALL,
) -> Restored:
    restoration = Restoration(engine, goal, from_checkpoint(path, trust_pickle, part), str(path), old)
    restoration.run()
    return Restored(path, engine.global_steps, restoration.client_state, restoration.kinds, restoration.digest)


def let_go(engine: EngineCore) -> None:
    """Make an engine as empty as an idle member's, without a message to anybody: what it holds counts no more."""
    engine.close_loaders()
    if engine.world is not None:
        engine.host.detach()
        engine.host.leave_world()
        engine.world = None


def _named(where: Path, tag: str | None) -> Path:
    """The checkpoint of a tag, or the latest; CheckpointError where there is none, of ours or of DeepSpeed's."""
    path = where / (folder.latest(where) if tag is None else tag)
    return path if is_zero_folder(path) and not (path / RECORD).is_file() else Saved.open(path).path


def _newest(where: Path, left_out: list[str], is_wanted: Callable[[str], bool]) -> Saved:
    for saved in folder.newest(where):
        is_whole = not saved.record.converted_from  # which is not all of a training
        if saved.path.name not in left_out and is_whole and is_wanted(saved.path.name):
            return saved
    passed = f"; damaged: {', '.join(left_out)}" if left_out else ""
    raise CheckpointError(f"there is no whole checkpoint in {where}{passed}; give a folder that engine.save wrote into")


def _chosen(engine: EngineCore, goal: Goal, find: Callable[[], Path]) -> Path:
    """The checkpoint that rank 0 finds; CheckpointError, on all members, if it finds none."""
    session = goal.session(engine.control)
    try:
        return Path(session.first("chosen", lambda: str(find()), "choosing a checkpoint"))
    except CheckpointError as error:
        session.decide(Decision(False, str(error)))
        raise
