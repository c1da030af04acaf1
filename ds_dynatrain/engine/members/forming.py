"""A new world after a failure: in the same processes, from what the living hold or from a checkpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ds_dynatrain.adapters.watched import Fate, is_lost_peer
from ds_dynatrain.adapters.worlds import World as GroupsOfWorld
from ds_dynatrain.adapters.worlds import build_world, drop
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints import restore
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.survival import Source, Survivor, whole_state
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.errors import CheckpointError, ElasticError, WorldChanged
from ds_dynatrain.report import logger

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine
    from ds_dynatrain.engine.members.changes import Changes

POLL_SECONDS = 0.002
NOTICE_SECONDS = 0.5
"""How long a member whose collective has failed waits for the coordinator to notice why."""
MOST_TRIES = 3
"""So often one step is tried in one world of which nobody dies; what fails still is the script, or the network."""


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether gloo, or torch's store, says that a peer did not answer; other errors are the user's."""
    return isinstance(error, WorldChanged) or is_lost_peer(error)


class Forming:
    """One member's part in it."""

    def __init__(self, engine: DynatrainEngine, elastic: Elastic, changes: Changes) -> None:
        self.engine = engine
        self.elastic = elastic
        self._changes = changes
        self._failed: tuple[tuple[int, tuple[str, ...]], int] = ((-1, ()), 0)

    def recover(self, error: RuntimeError) -> bool:
        """Something of the training has failed: form a new world if that was why; False if it was something else.

        ElasticError if this step has failed for the third time among the same members.
        """
        world = self.elastic.world
        if world is None or self.engine.idle:
            return False
        if not self.elastic.is_torn:
            if not is_of_a_collective(error):
                return False
            self._await_failure(world)
        self._count_failure(world, error)
        logger.warning("the world is torn (%s)", str(error).partition("\n")[0])
        self.form_anew()
        return True

    def _count_failure(self, world: World, error: RuntimeError) -> None:
        """A step that always fails would be tried for ever."""
        now = int(self.engine.global_steps), world.members
        tries = 1 + (self._failed[1] if self._failed[0] == now else 0)
        self._failed = now, tries
        if tries >= MOST_TRIES:
            raise ElasticError(
                f"the step after {now[0]} was tried {tries} times by the same {len(now[1])} members, and each time a "
                f"collective of it failed although none of them had died; the last said: {error}. Look for a "
                "collective that not all ranks call alike, or for a network that fails"
            ) from error

    def check(self) -> None:
        """WorldChanged if a collective of the present world has failed already, of whosoever's."""
        failure = self._failure
        if failure is not None:
            raise WorldChanged("a collective of this world has failed before") from failure

    def see_failure(self) -> None:
        """Form a new world, if a collective of the present one has failed where nobody could do so: in the script."""
        failure = self._failure
        if failure is not None:
            self.recover(failure)

    @property
    def _failure(self) -> RuntimeError | None:
        fate = None if self.engine.world is None else self.engine.world.fate
        return None if fate is None else fate.failure

    def _await_failure(self, world: World) -> None:
        """Until a failure is published; if the coordinator knows of none, it is told of one."""
        end, has_told = time.monotonic() + NOTICE_SECONDS, False
        while not self.elastic.is_torn:
            if time.monotonic() > end and not has_told:
                has_told = True
                newest = self.elastic.member.newest
                self.elastic.member.broken(world if newest is None else newest)
            if self.elastic.member.is_finished:
                raise SystemExit(0)
            time.sleep(POLL_SECONDS)

    def form_anew(self) -> None:
        """Stay here until there is a world again; the open global batch is void, and is dealt again.

        ElasticError if state was lost that nobody has any more.
        """
        self.engine.void_window()
        while self.elastic.is_torn:
            self._changes.look()
            if self.engine.idle:
                self._changes.wait_for_work()
                return
            self._changes.meet()
            time.sleep(POLL_SECONDS)

    def agree(self, change: Change) -> bool:
        """After a failure all who may hold state say what they hold, and judge it alike; False while some are awaited.

        Whoever holds nothing of the newest whole state is idle from here on.
        """
        if change.is_agreed:
            return True
        world, mine = change.world, self.elastic.member.id
        asked = [*world.members[: world.survivors], *world.leaving]
        if mine not in asked:
            self._be_left_out(change)
            change.is_agreed = True
            return True
        if not change.has_said:
            change.board.post(f"survivor/{mine}", self._survivor().to_json())
            change.has_said = True
        if not change.board.all_posted("survivor", asked):
            return False
        said = {one: Survivor(**(change.board.read(f"survivor/{one}") or {})) for one in asked}
        change.is_agreed = True
        if self.elastic.is_torn or any(one.is_torn for one in said.values()):
            self._go_on_from(change, whole_state(said))
        return True

    def _be_left_out(self, change: Change) -> None:
        """The coordinator had not heard yet that this member got a share; the others go on without it.

        ElasticError if they have none themselves.
        """
        if self.engine.idle or not self.elastic.is_torn:
            return
        if not change.world.survivors:
            raise ElasticError(
                f"generation {change.world.generation}: {change.world.reason}; nobody is known to hold the state "
                "of the job: start it again, from a checkpoint"
            )
        self.engine.give_state_up()

    def _survivor(self) -> Survivor:
        engine = self.engine
        return Survivor(
            number=engine.control.member,
            rank=None if engine.idle else engine.members.index(engine.control.member),
            generation=engine.generation,
            step=int(engine.global_steps),
            clean=not engine.is_stepping,
            is_torn=self.elastic.is_torn,
            layout=engine.layout.to_dict(),
        )

    def _go_on_from(self, change: Change, source: Source | None) -> None:
        """Hold what the source says this member holds."""
        engine = self.engine
        if source is None:
            if engine.settings.fallback is None or not change.world.survivors:
                raise ElasticError(
                    f"generation {change.world.generation}: {change.world.reason}; in {engine.layout} parts of the "
                    "state have died with it, and no checkpoint is there to go on from: start the job again from one "
                    "of your own, and configure dynatrain.fallback.path"
                )
            change.restores = True
            if not engine.idle:
                engine.give_state_up()
            return
        if not engine.idle and engine.control.member not in source.members:
            engine.give_state_up()
        engine.layout, engine.members = source.layout, source.members

    def restore(self, change: Change, proposal: Proposal) -> None:
        """Take all state from the newest fallback checkpoint, with all members of the target.

        CheckpointError if there is none that is whole.
        """
        engine, elastic, boards, settings = self.engine, self.elastic, change.boards, self.engine.settings
        if boards is None or settings.fallback is None:
            return
        generation = change.world.generation
        boards[0].succeed(engine.control)
        engine.surroundings = Surroundings(engine.launch, change.candidates, *boards)
        layout, members, mine = proposal.layout, proposal.members, change.board.member
        world: GroupsOfWorld | None = None
        try:
            with elastic.building(generation):
                ties = engine.vps.ties(layout)
                own = engine.own_groups.kinds(layout, members, change.candidates.nodes, mine)
                seconds = settings.timeout_seconds
                world = build_world(
                    boards[1].store, proposal.generation, mine, members, members, seconds, layout, ties, Fate(), own
                )
            found = restore.restore(engine, layout, members, world, settings.fallback.path)
        except (RuntimeError, CheckpointError) as error:
            if isinstance(error, CheckpointError) and not self._is_overtaken(change):
                raise
            logger.warning("generation %d could not be restored: %s", generation, error)
            self._give_restoring_up(change, world)
            return
        logger.warning("restored step %d from %s", found.step, found.path)
        change.board.decide(f"record/{proposal.generation}", {"commit": True, "reason": ""})
        elastic.settle()
        self._changes.enter(change, proposal)

    def _is_overtaken(self, change: Change) -> bool:
        """Whether somebody has died since; another member may have heard of it a moment before this one."""
        end = time.monotonic() + NOTICE_SECONDS
        while self.elastic.member.is_newest(change.world) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return not self.elastic.member.is_newest(change.world)

    def _give_restoring_up(self, change: Change, world: GroupsOfWorld | None) -> None:
        """Somebody has died meanwhile: be as before, and wait for the generation without it."""
        engine = self.engine
        if not engine.idle:
            engine.give_state_up()
        elif world is not None:
            engine.launch.install()
            change.board.bury(drop(world))
        self.elastic.let_go()
        change.proposal = None
        if self.elastic.member.is_newest(change.world):
            self.elastic.member.broken(change.world)
        while self.elastic.member.is_newest(change.world) and not self.elastic.member.is_finished:
            time.sleep(POLL_SECONDS)
