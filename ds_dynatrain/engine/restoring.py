"""Restoration after a loss of state: all engines get their state from copies or a checkpoint, in new worlds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.engine.checkpoints.joint import restore_all
from ds_dynatrain.engine.copies.from_copies import FromCopies
from ds_dynatrain.engine.copies.from_copies import serve as serve_from
from ds_dynatrain.engine.elastic import Elastic, GenerationBoards
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import CheckpointError, DynatrainError
from ds_dynatrain.extension import backups_of
from ds_dynatrain.membership.destinations import Registry
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.whole import WholeCopies
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.restoration import Goal, Restoration
from ds_dynatrain.reshard.restoration import let_go as empty

POLL_SECONDS = 0.002
NOTICE_SECONDS = 0.5
"""Seconds that a member waits after a failure for the coordinator to notice the cause."""


def restore(
    engines: Sequence[EngineParts],
    proposals: Sequence[Proposal],
    copies: Sequence[WholeCopies],
    boards: GenerationBoards,
    registry: Registry,
    elastic: Elastic,
) -> bool:
    """Restore the state of all engines from copies, or otherwise from the newest backup. All members of the layout call
    it.

    engines: the engines of this process.
    proposals: for each engine, the layout and members in which to restore it.
    copies: for each engine, a copy of its whole state, all from the same boundary; () if there are none.
    boards: the key-value stores of the new generation.
    registry: the numbers of the new generation's members.

    Returns whether the state is restored. If a failure or a death has prevented this, the engines hold no state, and a
    later generation tries again. Raises CheckpointError if there are neither copies nor a whole checkpoint.
    """
    worlds = dict[int, World]()
    try:
        for place, (engine, proposal) in enumerate(zip(engines, proposals, strict=True)):
            holders = copies[place].members if copies else ()
            with engine.turn():
                boards.adopt(engine, place, elastic.candidates(boards.world, registry))
                worlds[engine.job.number] = _world_of(engine, proposal, holders, boards.world, elastic)
        if not copies or not _are_restored(engines, proposals, worlds, copies, boards.world, elastic):
            for restored in restore_all(engines, proposals, worlds):
                logger.warning("restored step %d from %s", restored.step, restored.path)
    except (RuntimeError, CheckpointError) as error:
        if isinstance(error, CheckpointError) and not _is_overtaken(boards.world, elastic):
            raise
        logger.warning(
            "generation %d could not be restored (%s); the next one tries again", boards.world.generation, error
        )
        _give_up(engines, worlds, elastic)
        if elastic.member.is_newest(boards.world):
            elastic.member.broken(boards.world)
        return False
    for engine in engines:
        elastic.settle(engine.job.number)
    return True


def _are_restored(
    engines: Sequence[EngineParts],
    proposals: Sequence[Proposal],
    worlds: Mapping[int, World],
    copies: Sequence[WholeCopies],
    newest: Generation,
    elastic: Elastic,
) -> bool:
    """Restore all engines from copies, and return whether this succeeded.

    Returns False if it fails although no member has died, and there is a backup to try instead.
    """
    parts = list(zip(engines, proposals, copies, strict=True))
    try:
        for engine, proposal, whole in parts:
            world, where = worlds[engine.job.number], f"copies of step {whole.mark.step}"
            with engine.turn():
                empty(engine)
                goal = _goal(proposal, world)
                source = partial(FromCopies, engine, goal, whole, engine.kept)
                Restoration(engine, goal, source, where, None).run()
                engine.control.track_teardown(world.retire_transfer())
    except CheckpointError as error:
        backups = backups_of(engines[0].extensions)
        if backups is None or _is_overtaken(newest, elastic):
            raise
        logger.error("%s; all goes back to the %s", error, backups.what)
        return False
    for engine, _, whole in parts:
        _stay(engine, whole)
        logger.warning("restored step %d from copies that members keep of each other", whole.mark.step)
    return True


def serve(
    engines: Sequence[EngineParts],
    proposals: Sequence[Proposal],
    copies: Sequence[WholeCopies],
    boards: GenerationBoards,
    registry: Registry,
    elastic: Elastic,
) -> None:
    """Send the copies that this member keeps to the restoring members. A failure is only logged, because those members
    notice it, too.

    The arguments are those of `restore`. All worlds are built before anything is sent, as on the restoring members.
    """
    mine, worlds = boards.of()[0].member, dict[int, World]()
    parts = [
        (place, engine, proposal, whole)
        for place, (engine, proposal, whole) in enumerate(zip(engines, proposals, copies, strict=True))
        if mine in whole.members
    ]
    try:
        for place, engine, proposal, whole in parts:
            with engine.turn():
                boards.adopt(engine, place, elastic.candidates(boards.world, registry))
                worlds[place] = _world_of(engine, proposal, whole.members, boards.world, elastic)
        for place, engine, proposal, whole in parts:
            with engine.turn():
                serve_from(engine, _goal(proposal, worlds[place]), whole, engine.kept)
        for _, engine, _, whole in parts:
            _stay(engine, whole)
    except (RuntimeError, DynatrainError) as error:
        logger.warning(
            "generation %d: copies could not be given (%s); the next one tries again", boards.world.generation, error
        )
    finally:
        for place, engine, _, _ in parts:
            if place in worlds:
                engine.control.track_teardown(drop(worlds[place]))
            elastic.let_go(engine.job.number)


def _stay(engine: EngineParts, copies: WholeCopies) -> None:
    """Mark these copies of an engine as whole, so that other copies are overwritten first."""
    if engine.kept is not None and any(copy.mark == copies.mark for copy in engine.kept.copies()):
        engine.kept.is_whole(copies.mark)


def void_before(engine: EngineParts, stretch: tuple[int, ...]) -> None:
    """Discard an engine's copies from before this stretch of training (each load begins a new stretch)."""
    if engine.kept is not None:
        engine.kept.void_before(stretch)


def _goal(proposal: Proposal, world: World) -> Goal:
    key = f"restore/{world.generation}/copies"
    return Goal(proposal.layout, proposal.members, world, key, f"{key}/record")


def let_go(engine: EngineParts) -> None:
    """Make an engine drop its state, if it has any."""
    if not engine.idle:
        with engine.turn():
            engine.give_state_up()


def _world_of(
    engine: EngineParts, proposal: Proposal, holders: Sequence[int], world: Generation, elastic: Elastic
) -> World:
    """Return an engine's next world. Its group for transfers includes `holders`, the members that hold copies."""
    number, mine = engine.job.number, engine.control.member
    layout, members, seconds = proposal.layout, proposal.members, engine.settings.timeout_seconds
    with elastic.building(world.generation, number) as note:
        own = engine.own_groups.kinds(layout, members, engine.candidates.nodes, mine)
        sides = mine, members, (*members, *holders), layout, engine.vps.ties(layout)
        spec = WorldSpec(proposal.generation, *sides, own, number, engine.job.has_sequence)
        made = build_world(engine.context.background.store, spec, seconds, GroupStatus(), note=note)
        made.connect(seconds)
        return made


def _is_overtaken(world: Generation, elastic: Elastic) -> bool:
    """Return whether a later generation was published. Waits shortly for one, because others may learn of a death
    first."""
    end = time.monotonic() + NOTICE_SECONDS
    while elastic.member.is_newest(world) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return not elastic.member.is_newest(world)


def _give_up(engines: Sequence[EngineParts], worlds: Mapping[int, World], elastic: Elastic) -> None:
    for engine in engines:
        number = engine.job.number
        if not engine.idle:
            let_go(engine)
        elif number in worlds:
            with engine.turn():
                engine.launch.install()
                engine.control.track_teardown(drop(worlds[number]))
        elastic.let_go(number)
