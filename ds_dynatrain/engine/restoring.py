"""Restoration after a loss of state: all engines get their state from copies or a checkpoint, in new worlds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import WorldSpec, build_world, drop
from ds_dynatrain.engine.checkpoints.restore import restore_all
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


@dataclass(frozen=True)
class StateRecovery:
    """Restoration of all engines of a process after a loss of state, in the worlds of a new generation.

    engines: the engines of this process.
    proposals: for each engine, the layout and members in which to restore it.
    copies: for each engine, the set of copies from which to restore it, all taken at the same point in training; () to
        restore from a checkpoint.
    boards: the key-value stores of the new generation.
    registry: the numbers of the new generation's members.
    """

    engines: Sequence[EngineParts]
    proposals: Sequence[Proposal]
    copies: Sequence[WholeCopies]
    boards: GenerationBoards
    registry: Registry
    elastic: Elastic

    def restore(self) -> bool:
        """Restore all engines from copies or, if that is not possible, from the newest backup checkpoint. All members
        of the new layout call it.

        Returns whether the state is restored. If a failure or a death has prevented this, the engines hold no state,
        and a later generation tries again. Raises CheckpointError if there are neither copies nor a complete
        checkpoint.
        """
        worlds, newest = dict[int, World](), self.boards.world
        try:
            for place, engine in enumerate(self.engines):
                with engine.turn():
                    worlds[engine.job.number] = self._world_of(place)
            if not self.copies or not self._are_restored(worlds):
                for restored in restore_all(self.engines, self.proposals, worlds):
                    logger.warning("restored step %d from %s", restored.step, restored.path)
        except (RuntimeError, CheckpointError) as error:
            if isinstance(error, CheckpointError) and not self._is_overtaken():
                raise
            logger.warning(
                "generation %d could not be restored (%s); the next one tries again", newest.generation, error
            )
            for engine in self.engines:
                if not engine.idle:
                    let_go(engine)
                elif engine.job.number in worlds:
                    with engine.turn():
                        engine.launch.install()
                        engine.control.teardowns.add(drop(worlds[engine.job.number]))
                self.elastic.let_go(engine.job.number)
            if self.elastic.member.is_newest(newest):
                self.elastic.member.broken(newest)
            return False
        for engine in self.engines:
            self.elastic.settle(engine.job.number)
        return True

    def _are_restored(self, worlds: Mapping[int, World]) -> bool:
        """Restore all engines from copies; return whether this succeeded.

        Returns False if it fails although no member has died, provided that there is a backup checkpoint to try
        instead; without one, raises CheckpointError.

        worlds: a map from each engine's number to its new world.
        """
        parts = list(zip(self.engines, self.proposals, self.copies, strict=True))
        try:
            for engine, proposal, whole in parts:
                world, where = worlds[engine.job.number], f"copies of step {whole.mark.step}"
                with engine.turn():
                    empty(engine)
                    goal = _goal(proposal, world)
                    source = partial(FromCopies, engine, goal, whole, engine.kept)
                    Restoration(engine, goal, source, where, None).run()
                    engine.control.teardowns.add(world.retire_transfer())
        except CheckpointError as error:
            backups = backups_of(self.engines[0].extensions)
            if backups is None or self._is_overtaken():
                raise
            logger.error("%s; all goes back to the %s", error, backups.what)
            return False
        for engine, _, whole in parts:
            engine.kept.mark_whole(whole.mark)
            logger.warning("restored step %d from copies that members keep of each other", whole.mark.step)
        return True

    def serve(self) -> None:
        """Send the copies that this member keeps to the members that restore the state. A failure is only logged,
        because those members also notice it.

        All worlds are built before anything is sent, as on those members.
        """
        mine, worlds = self.boards.of()[0].member, dict[int, World]()
        parts = [
            (place, engine, proposal, whole)
            for place, (engine, proposal, whole) in enumerate(
                zip(self.engines, self.proposals, self.copies, strict=True)
            )
            if mine in whole.members
        ]
        try:
            for place, engine, _, _ in parts:
                with engine.turn():
                    worlds[place] = self._world_of(place)
            for place, engine, proposal, whole in parts:
                with engine.turn():
                    serve_from(engine, _goal(proposal, worlds[place]), whole, engine.kept)
            for _, engine, _, whole in parts:
                engine.kept.mark_whole(whole.mark)
        except (RuntimeError, DynatrainError) as error:
            generation = self.boards.world.generation
            logger.warning("generation %d: copies could not be given (%s); the next one tries again", generation, error)
        finally:
            for place, engine, _, _ in parts:
                if place in worlds:
                    engine.control.teardowns.add(drop(worlds[place]))
                self.elastic.let_go(engine.job.number)

    def _world_of(self, place: int) -> World:
        """Build and return an engine's next world. Its process group for transfers includes the members that hold
        copies.

        place: the index of the engine in the process.
        """
        engine, proposal, world = self.engines[place], self.proposals[place], self.boards.world
        holders = self.copies[place].members if self.copies else ()
        self.boards.adopt(engine, place, self.elastic.candidates(world, self.registry))
        number, mine = engine.job.number, engine.control.member
        layout, members, seconds = proposal.layout, proposal.members, engine.settings.timeout_seconds
        with self.elastic.building(world.generation, number):
            own = engine.own_groups.kinds(layout, members, engine.candidates.nodes, mine)
            sides = mine, members, (*members, *holders), layout, engine.vps.ties(layout)
            spec = WorldSpec(proposal.generation, *sides, own, number, engine.job.has_sequence)
            made = build_world(engine.context.background.store, spec, seconds, GroupStatus())
            made.connect(seconds)
            return made

    def _is_overtaken(self) -> bool:
        """Return whether a later generation was published. Waits `NOTICE_SECONDS` for it, because other members may
        learn of a death earlier than the coordinator."""
        end, is_newest = time.monotonic() + NOTICE_SECONDS, partial(self.elastic.member.is_newest, self.boards.world)
        while is_newest() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return not is_newest()


def _goal(proposal: Proposal, world: World) -> Goal:
    key = f"restore/{world.generation}/copies"
    return Goal(proposal.layout, proposal.members, world, key, f"{key}/record")


def let_go(engine: EngineParts) -> None:
    """Make an engine idle: release its state, if it has any."""
    if not engine.idle:
        with engine.turn():
            engine.host.detach()
            engine.is_stepping = False
            engine.host.leave_world()
            engine.leave_groups()
