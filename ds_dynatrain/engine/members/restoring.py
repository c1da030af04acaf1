"""After a failure in which state was lost: all engines take theirs from a checkpoint, in new worlds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.adapters.worlds import World as GroupsOfWorld
from ds_dynatrain.adapters.worlds import build_world, drop
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints.joint import restore_all
from ds_dynatrain.engine.members.boards import GenerationBoards
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.registry import Registry
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger

POLL_SECONDS = 0.002
NOTICE_SECONDS = 0.5
"""How long a member that has failed waits for the coordinator to notice why."""


def restore(
    engines: Sequence[EngineParts],
    proposals: Sequence[Proposal],
    boards: GenerationBoards,
    registry: Registry,
    elastic: Elastic,
) -> bool:
    """Take all state from the newest fallback checkpoint, with all members of the target.

    False if somebody has died meanwhile: the engines are as before then, and a later generation will come.
    CheckpointError if there is none that is whole.
    """
    worlds = dict[int, GroupsOfWorld]()
    try:
        for place, (engine, proposal) in enumerate(zip(engines, proposals, strict=True)):
            with engine.turn():
                boards.adopt(engine, place, elastic.candidates(boards.world, registry))
                worlds[engine.job.number] = _world_of(engine, proposal, boards.world, elastic)
        found = restore_all(engines, proposals, worlds)
    except (RuntimeError, CheckpointError) as error:
        if isinstance(error, CheckpointError) and not _is_overtaken(boards.world, elastic):
            raise
        logger.warning("generation %d could not be restored: %s", boards.world.generation, error)
        _give_up(engines, worlds, elastic)
        if elastic.member.is_newest(boards.world):
            elastic.member.broken(boards.world)
        return False
    for engine, restored in zip(engines, found, strict=True):
        logger.warning("restored step %d from %s", restored.step, restored.path)
        elastic.settle(engine.job.number)
    return True


def let_go(engine: EngineParts) -> None:
    """Let an engine hold nothing any more."""
    if not engine.idle:
        with engine.turn():
            engine.give_state_up()


def _world_of(engine: EngineParts, proposal: Proposal, world: World, elastic: Elastic) -> GroupsOfWorld:
    """The groups of an engine's next world."""
    number, mine = engine.job.number, engine.control.member
    layout, members, seconds = proposal.layout, proposal.members, engine.settings.timeout_seconds
    with elastic.building(world.generation, number):
        own = engine.own_groups.kinds(layout, members, engine.candidates.nodes, mine)
        sides = mine, members, members, seconds, layout, engine.vps.ties(layout)
        of_engine = own, number, engine.job.has_sequence
        store = engine.context.background.store
        made = build_world(store, proposal.generation, *sides, GroupStatus(), *of_engine)
        made.connect(seconds)
        return made


def _is_overtaken(world: World, elastic: Elastic) -> bool:
    """Whether somebody has died since; another member may have heard of it a moment before this one."""
    end = time.monotonic() + NOTICE_SECONDS
    while elastic.member.is_newest(world) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return not elastic.member.is_newest(world)


def _give_up(engines: Sequence[EngineParts], worlds: Mapping[int, GroupsOfWorld], elastic: Elastic) -> None:
    for engine in engines:
        number = engine.job.number
        if not engine.idle:
            let_go(engine)
        elif number in worlds:
            with engine.turn():
                engine.launch.install()
                engine.control.track_teardown(drop(worlds[number]))
        elastic.let_go(number)
