"""A new world after a failure: in the same processes, from what the living hold or from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from ds_dynatrain.adapters.watched import Fate, is_lost_peer
from ds_dynatrain.adapters.worlds import World as GroupsOfWorld
from ds_dynatrain.adapters.worlds import build_world, drop
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints.joint import restore_all
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.survival import Source, Survivor, whole_state
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.errors import CheckpointError, ElasticError, WorldChanged
from ds_dynatrain.report import logger

POLL_SECONDS = 0.002
NOTICE_SECONDS = 0.5
"""How long a member whose collective has failed waits for the coordinator to notice why."""
MOST_TRIES = 3
"""So often one step is tried in one world of which nobody dies; what fails still is the script, or the network."""


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether gloo, or torch's store, says that a peer did not answer; other errors are the user's."""
    return isinstance(error, WorldChanged) or is_lost_peer(error)


class Around(Protocol):
    """What forming asks of the part that follows changes of members; see `changes.Changes`."""

    engines: list[EngineParts]

    def look(self) -> None: ...
    def meet(self) -> None: ...
    def wait_for_work(self) -> None: ...
    def enter(self, change: Change) -> None: ...


class Forming:
    """One member's part in it."""

    def __init__(self, elastic: Elastic, changes: Around) -> None:
        self.elastic = elastic
        self._changes = changes
        self._failed: tuple[tuple[tuple[int, ...], tuple[str, ...]], int] = (((), ()), 0)

    @property
    def engine(self) -> EngineParts:
        """The first one."""
        return self._changes.engines[0]

    @property
    def engines(self) -> list[EngineParts]:
        """All of this process."""
        return self._changes.engines

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
            self._await_failure()
        self._count_failure(world, error)
        logger.warning("the world is torn (%s)", str(error).partition("\n")[0])
        self.form_anew()
        return True

    def _count_failure(self, world: World, error: RuntimeError) -> None:
        """A step that always fails would be tried for ever."""
        now = tuple(engine.global_steps for engine in self.engines), world.members
        tries = 1 + (self._failed[1] if self._failed[0] == now else 0)
        self._failed = now, tries
        if tries >= MOST_TRIES:
            raise ElasticError(
                f"the step after {now[0][0]} was tried {tries} times by the same {len(now[1])} members, and each time "
                f"a collective of it failed although none of them had died; the last said: {error}. Look for a "
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
        worlds = [engine.world for engine in self.engines if engine.world is not None]
        failures = [world.fate.failure for world in worlds if world.fate is not None]
        return next((failure for failure in failures if failure is not None), None)

    def close_worlds(self) -> None:
        """No collectives until the boundary: where the others are in their scripts, nobody knows."""
        for engine in self.engines:
            if engine.world is not None and engine.world.fate is not None:
                engine.world.fate.is_closed = True

    def _await_failure(self) -> None:
        """Until a failure is published; if the coordinator knows of none, it is told of one."""
        end, has_told = time.monotonic() + NOTICE_SECONDS, False
        while not self.elastic.is_torn:
            if time.monotonic() > end and not has_told:
                has_told = True
                self.elastic.breach()
            if self.elastic.member.is_finished:
                raise SystemExit(0)
            time.sleep(POLL_SECONDS)

    def form_anew(self) -> None:
        """Stay here until there is a world again; open global batches are void, and are dealt again.

        ElasticError if state was lost that nobody has any more.
        """
        for engine in self.engines:
            if not engine.idle:
                with engine.turn():
                    engine.void_window()
        self._until_formed()
        for engine in self.engines:
            if not engine.idle:  # void batches may still come, and where it stood before may count no more
                with engine.turn():
                    engine.window.note()

    def _until_formed(self) -> None:
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
        boards = [change.boards_of(engine.job.number)[0] for engine in self.engines]
        if not change.has_said:
            for engine, board in zip(self.engines, boards, strict=True):
                board.post(f"survivor/{mine}", self._survivor(engine).to_json())
            change.has_said = True
        if not all(board.all_posted("survivor", asked) for board in boards):
            return False
        said = [{one: Survivor(**(board.read(f"survivor/{one}") or {})) for one in asked} for board in boards]
        change.is_agreed = True
        if self.elastic.is_torn or any(one.is_torn for one in said[0].values()):
            self._go_on_from(change, [whole_state(of_engine) for of_engine in said])
        return True

    def _be_left_out(self, change: Change) -> None:
        """Nobody asks what this member holds: it is a newcomer, or the coordinator had not heard of its share yet.

        The others go on without that. ElasticError if none of them holds anything: nobody would tell it what to do.
        """
        world, is_idle = change.world, all(engine.idle for engine in self.engines)
        if not is_idle and not self.elastic.is_torn:
            return
        if not world.survivors and not (is_idle and world.leaving):
            raise ElasticError(
                f"generation {world.generation}: {world.reason}; nobody is known to hold the state "
                "of the job: start it again, from a checkpoint"
            )
        for engine in self.engines:
            _give_up(engine)

    def _survivor(self, engine: EngineParts) -> Survivor:
        return Survivor(
            number=engine.control.member,
            rank=None if engine.idle else engine.members.index(engine.control.member),
            generation=engine.generation,
            step=engine.global_steps,
            clean=not engine.is_stepping,
            is_torn=self.elastic.is_torn,
            layout=engine.layout.to_dict(),
        )

    def _go_on_from(self, change: Change, sources: list[Source | None]) -> None:
        """Hold what the sources, one for each engine, say this member holds; all from a checkpoint if one is none."""
        for engine, source in zip(self.engines, sources, strict=True):
            if source is None:
                self._go_back(change, engine)
                return
        for engine, source in zip(self.engines, sources, strict=True):
            if source is not None:
                if engine.control.member not in source.members:
                    _give_up(engine)
                engine.layout, engine.members = source.layout, source.members

    def _go_back(self, change: Change, lost: EngineParts) -> None:
        """Have all engines restored, since one has lost state: there is one history for all of them."""
        if lost.settings.fallback is None or not change.world.survivors:
            raise ElasticError(
                f"generation {change.world.generation}: {change.world.reason}; in {lost.layout} parts of the "
                "state have died with it, and no checkpoint is there to go on from: start the job again from one "
                "of your own, and configure dynatrain.fallback.path"
            )
        change.restores = True
        for engine in self.engines:
            _give_up(engine)

    def restore(self, change: Change) -> None:
        """Take all state from the newest fallback checkpoint, with all members of the target.

        CheckpointError if there is none that is whole.
        """
        generation, worlds = change.world.generation, dict[int, GroupsOfWorld]()
        try:
            for engine, proposal in zip(self.engines, change.proposals, strict=True):
                with engine.turn():
                    worlds[engine.job.number] = self._world_to_restore_in(change, engine, proposal)
            found = restore_all(self.engines, change.proposals, worlds)
        except (RuntimeError, CheckpointError) as error:
            if isinstance(error, CheckpointError) and not self._is_overtaken(change):
                raise
            logger.warning("generation %d could not be restored: %s", generation, error)
            self._give_restoring_up(change, worlds)
            return
        for engine, restored in zip(self.engines, found, strict=True):
            logger.warning("restored step %d from %s", restored.step, restored.path)
            self.elastic.settle(engine.job.number)
        change.board.decide(f"record/{change.proposals[0].generation}", {"commit": True, "reason": ""})
        self._changes.enter(change)

    def _world_to_restore_in(self, change: Change, engine: EngineParts, proposal: Proposal) -> GroupsOfWorld:
        """The groups of an engine's next world, and its boards."""
        number, boards, mine = engine.job.number, change.boards_of(engine.job.number), change.board.member
        boards[0].succeed(engine.control)
        engine.surroundings = Surroundings(engine.launch, change.candidates, *boards)
        layout, members, seconds = proposal.layout, proposal.members, engine.settings.timeout_seconds
        with self.elastic.building(change.world.generation, number):
            own = engine.own_groups.kinds(layout, members, change.candidates.nodes, mine)
            sides = mine, members, members, seconds, layout, engine.vps.ties(layout)
            of_engine = own, number, engine.job.has_sequence
            return build_world(boards[1].store, proposal.generation, *sides, Fate(), *of_engine)

    def _is_overtaken(self, change: Change) -> bool:
        """Whether somebody has died since; another member may have heard of it a moment before this one."""
        end = time.monotonic() + NOTICE_SECONDS
        while self.elastic.member.is_newest(change.world) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return not self.elastic.member.is_newest(change.world)

    def _give_restoring_up(self, change: Change, worlds: Mapping[int, GroupsOfWorld]) -> None:
        """Somebody has died meanwhile: be as before, and wait for the generation without it."""
        for engine in self.engines:
            number = engine.job.number
            if not engine.idle:
                _give_up(engine)
            elif number in worlds:
                with engine.turn():
                    engine.launch.install()
                    change.board.bury(drop(worlds[number]))
            self.elastic.let_go(number)
        change.proposals = ()
        if self.elastic.member.is_newest(change.world):
            self.elastic.member.broken(change.world)
        while self.elastic.member.is_newest(change.world) and not self.elastic.member.is_finished:
            time.sleep(POLL_SECONDS)


def _give_up(engine: EngineParts) -> None:
    """Let an engine hold nothing any more."""
    if not engine.idle:
        with engine.turn():
            engine.give_state_up()
