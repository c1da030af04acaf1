"""An engine's buddies: at boundaries, which are due; beside training, one round at a time; and what a user sees.

All working members come by the same boundaries and decide from the same numbers: what each says of the round before is
reduced over their world, so that all take their copies at the same steps, or none does. Only when all have all copies
of a moment may the older ones be written over.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager

import torch
import torch.distributed as td

from ds_dynatrain.adapters.device import start_thread
from ds_dynatrain.adapters.watched import is_lost_peer
from ds_dynatrain.adapters.world import World
from ds_dynatrain.elastic.messages import Protected
from ds_dynatrain.engine.buddies.choice import Choice
from ds_dynatrain.engine.buddies.kept import Kept
from ds_dynatrain.engine.buddies.shipping import Round, Ward
from ds_dynatrain.engine.buddies.taking import Taken, mark_of, take
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.feasible import available_bytes
from ds_dynatrain.engine.groups import BUDDIES
from ds_dynatrain.errors import ConfigError, DynatrainError, WorldChanged
from ds_dynatrain.plan import buddies_of, has_one_holder, memory_of_copies, wards_of
from ds_dynatrain.report import Protection, logger
from ds_dynatrain.transfer import GroupTransport

MILLIONTHS = 1_000_000
NOT_REPLAYED = "steps are not replayed any more, and no copy is whole yet"
NEW_WORLD = "no copy of this world is whole yet"


class Buddies:
    """Of one engine, for the whole job. kept: the copies that this process has."""

    def __init__(self, engine: EngineCore) -> None:
        self.kept = Kept()
        self._engine, self._settings = engine, engine.settings.buddies
        self._choice = Choice(engine, self.kept)
        self._world: World | None = None
        self._buddies: tuple[tuple[int, ...], ...] = ()
        self._pairs: dict[int, tuple[int, ...]] = {}
        """The same by members."""
        self._why = NEW_WORLD
        self._is_protected = self._is_behind = False
        self._whole_of: dict[int, tuple[int, ...]] = {}
        """Member -> who kept its copy of the newest moment that is whole; of a world before, maybe."""
        self._seen: tuple[str, int, int] = ("", 0, -1)
        self._next: int | None = None
        """The step at which a copy is due; None: at once."""
        self._round: Round | None = None
        self._thread: threading.Thread | None = None
        self._left_at = 0.0
        self._take_seconds, self._share = 0.0, 0.0
        self._sent_bytes, self._ship_seconds = 0, 0.0
        self._taken = self._skipped = 0
        self._last_error = ""

    def check(self) -> None:
        """The first world. UnsupportedError if its steps cannot be replayed as is asked for, ConfigError if it has too
        few members, or this node too little host memory for its copies."""
        self._choice.check()
        engine, nodes = self._engine, self._engine.candidates.nodes
        where, mine = [nodes[member] for member in engine.members], nodes[engine.control.member]
        copies, others = self._settings.copies, len(where) - 1
        if 0 < others < copies:
            raise ConfigError(
                f"dynatrain.buddies.copies: {copies} others are to keep each copy, and {others + 1} members work; "
                f"start on {copies + 1} at least (MIN in torchrun --nnodes=MIN:MAX), or ask for {others}"
            )
        needs = memory_of_copies(engine.vps, engine.layout, where, copies)
        here = [need for need, node in zip(needs, where, strict=True) if node == mine]
        if sum(here) > (free := available_bytes()):
            raise ConfigError(
                f"dynatrain.buddies: the {len(here)} ranks on node {mine!r} need {sum(here)} bytes for copies of what "
                f"they and their wards hold alone, and {free} are available; start on more nodes, or leave it out"
            )

    # ---- at a boundary -----------------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """A boundary of a working member, between two global batches; once for each step.

        After what else takes place there, so that no switch waits for a copy that was taken just before it. If a member
        is lost meanwhile, what follows of that is found where collectives of training fail, too.
        """
        engine = self._engine
        now = engine.segment, len(engine.registered), engine.global_steps
        if now == self._seen or (engine.segment, engine.global_steps) == engine.formed_at:
            return
        begin = time.perf_counter()
        if now[:2] != self._seen[:2]:
            self._next = None
        if now[1] != self._seen[1]:
            self.forget()  # what the copies are of is not registered any more
        self._seen, self._share = now, self._take_seconds / max(begin - self._left_at, 1e-6)
        try:
            self._look()
        except RuntimeError as error:
            if not isinstance(error, WorldChanged) and not is_lost_peer(error):
                raise
            logger.debug("no copy of step %d: %s", engine.global_steps, error)
        self._left_at = time.perf_counter()

    def settle(self) -> None:
        """The world is about to be left: wait until nothing is under way in its group, for the usual time-out.

        What is replayed counts as it is now until copies of another world are whole.
        """
        if self._thread is not None:
            self._thread.join(self._engine.settings.timeout_seconds)
            self._thread = None
        self._choice.end()

    def forget(self) -> None:
        """Training goes on from another state, on all members: no copy from before counts."""
        self.kept.forget()
        self._choice.replay = None
        self._is_protected, self._why = False, "another state was loaded: no copy of it is whole yet"
        if self._round is not None:
            self._round.is_void = True

    def _look(self) -> None:
        if self._world is not self._engine.world:
            self._enter()
        if self._choice.is_on:
            self._follow()
            return
        step = self._engine.global_steps
        is_due = bool(self._buddies) and (self._next is None or step >= self._next)
        if not is_due and self._round is None:
            return
        if self._round is not None:
            self._see(self._round)
        if is_due:
            self._next = step + self._choice.every
            if self._round is None:
                self._begin()
            else:
                self._skipped += 1

    def _enter(self) -> None:
        """Another world: who keeps whose copies there. Who has just come knows of no longer interval of the others'."""
        self.settle()
        engine, self._round, self._next = self._engine, None, None
        was_protected, self._is_protected = self._is_protected, False
        self._world, self._buddies, self._pairs = engine.world, (), {}
        vps, layout = engine.vps, engine.layout
        if layout.world_size == 1:
            self._why = "one member alone works: nobody could keep its copy"
        elif not any(has_one_holder(vps, layout, kind) for kind in vps.present_kinds()):
            self._is_protected, self._why = True, f"in {layout} every element has several holders: nothing is copied"
        else:
            self._buddies = self._buddies_here()
            members, here = engine.members, {*engine.candidates.members}
            kept = [{member, *buddies} for member, buddies in self._whole_of.items()]
            self._is_protected = was_protected and all(len(here & holders) > 1 for holders in kept)
            self._why = "" if self._is_protected else NEW_WORLD
            self._pairs = {members[rank]: tuple(members[each] for each in of) for rank, of in enumerate(self._buddies)}
        if engine.rank == 0 and was_protected and not self._is_protected:
            logger.warning("buddies: unprotected: %s", self._why)
        elif engine.rank == 0 and not self._buddies:
            logger.info("buddies: %s", self._why)
        self._choice.enter(bool(self._buddies))

    def _buddies_here(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank, as many as are asked for or there can be."""
        engine, asked = self._engine, self._settings.copies
        found = buddies_of([engine.candidates.nodes[member] for member in engine.members], asked)
        if engine.rank == 0 and len(found[0]) < asked:
            logger.warning("buddies: %d others keep each copy here, and %d are asked for", len(found[0]), asked)
        return found

    # ---- steps that are replayed -------------------------------------------------------------------------------------

    def watched_step(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        return self._choice.watched_step()

    def finish_step(self) -> None:
        """See `Replay.finish`."""
        if self._choice.replay is not None:
            self._choice.replay.finish()

    def _follow(self) -> None:
        """Where steps are replayed. All begins with copies of one moment, which a step waits for."""
        if self._choice.goes_on():
            if (replay := self._choice.replay) is not None:
                self._take_seconds, self._ship_seconds = replay.seconds, replay.ship_seconds
                self._sent_bytes, self._taken = replay.sent_bytes, self._taken + 1
            else:
                self._is_protected, self._why, self._next = False, NOT_REPLAYED, None
            return
        self._begin()
        if self._thread is not None:
            self._thread.join()
        if self._round is not None:
            self._see(self._round)
        if self.kept.whole == mark_of(self._engine):
            self._choice.begin(self._buddies)

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        engine, world = self._engine, self._engine.world
        if world is None:
            return
        self.settle()
        begin, mark, rank, members = time.perf_counter(), mark_of(engine), engine.rank, engine.members
        wards = wards_of(self._buddies, rank)
        own, rooms = self.kept.begin(mark, len(wards))
        taken: Taken | None = None
        try:
            taken = take(engine, own)
            self.kept.frozen, self.kept.frozen_of = taken.frozen, (engine.layout, rank)
        except (DynatrainError, RuntimeError, MemoryError, OSError) as error:  # torch has no memory: RuntimeError
            logger.error("buddies: member %d has no copy of step %d: %s", members[rank], mark.step, error)
        kept_here = [Ward(members[ward], ward, room) for ward, room in zip(wards, rooms, strict=True)]
        transport = GroupTransport(world.group(BUDDIES), members)
        self._round = Round(mark, taken, self._pairs[members[rank]], kept_here, transport, self.kept)
        self._thread = start_thread(self._round.run, "dynatrain-buddies")
        self._taken, self._take_seconds = self._taken + 1, time.perf_counter() - begin

    def _see(self, found: Round) -> None:
        """How the last round has ended, if it has for all; what each says of it is reduced over the world."""
        share = -int(self._share * MILLIONTHS)
        said = torch.tensor([int(found.is_over), int(found.is_over and found.is_whole), share])
        if self._engine.world is not None:
            td.all_reduce(said, td.ReduceOp.MIN, group=self._engine.world.default)
        is_over, is_whole, share = (int(value) for value in said)
        if not is_over:
            return
        is_whole &= not found.is_void
        self._round, self._sent_bytes, self._ship_seconds = None, found.sent_bytes, found.seconds
        if is_whole:
            self.kept.is_whole(found.mark)
            self._whole_of = dict(self._pairs)
        self._tell(found, bool(is_whole))
        self._choice.weigh(-share / MILLIONTHS, self._take_seconds)

    def _tell(self, found: Round, is_whole: bool) -> None:
        """Once of each thing that has changed."""
        step = found.mark.step
        if found.error != self._last_error:
            self._last_error = found.error
            if found.error:
                logger.error("buddies: the copies of step %d are not whole: %s", step, found.error)
        was_protected, was_behind = self._is_protected, self._is_behind
        self._is_protected, self._is_behind = was_protected or is_whole, not is_whole
        self._why = "" if self._is_protected else self._why
        if self._engine.rank != 0:
            return
        if is_whole and not was_protected:
            logger.info("buddies: protected from step %d on: the death of a member loses no more than follows it", step)
        elif self._is_protected and self._is_behind and not was_behind:
            whole = self.kept.whole
            since = "the last that are" if whole is None else f"step {whole.step}"
            logger.warning("buddies: the copies of step %d are not whole; a death costs what follows %s", step, since)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    @property
    def is_said_to_protect(self) -> Protected:
        """For the status of the job; nothing on a member that holds no state."""
        if self._engine.idle:
            return ""
        return "yes" if self.protection.is_protected else "no"

    @property
    def _mode(self) -> str:
        """What is done in this world."""
        return "replay" if self._choice.is_on else "copy"

    @property
    def protection(self) -> Protection:
        """For people, and for scripts that watch."""
        replay = self._choice.replay
        whole = self.kept.whole if replay is None else replay.mark
        is_known = self._world is self._engine.world
        return Protection(
            mode=self._mode,
            buddies=dict(self._pairs) if is_known else {},
            step=None if whole is None else whole.step,
            is_protected=is_known and self._is_protected,
            why=self._why if is_known else NEW_WORLD,
            every_steps=1 if replay is not None else self._choice.every,
            memory_bytes=self.kept.nbytes + (0 if replay is None else replay.nbytes),
            sent_bytes=self._sent_bytes,
            take_ms=1e3 * self._take_seconds,
            ship_ms=1e3 * self._ship_seconds,
            taken=self._taken,
            skipped=self._skipped,
        )
