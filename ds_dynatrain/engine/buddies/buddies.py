"""An engine's buddies: at boundaries, which are due; beside training, one round at a time; and what a user sees.

All working members come by the same boundaries and decide from the same numbers: what each says of the round before is
reduced over their world, so that all take their copies at the same steps, or none does. Only when all have all copies
of a moment may the older ones be written over.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as td

from ds_dynatrain.adapters.device import start_thread
from ds_dynatrain.adapters.replaying import watched_step, why_not
from ds_dynatrain.adapters.watched import is_lost_peer
from ds_dynatrain.adapters.worlds import World
from ds_dynatrain.elastic.messages import Protected
from ds_dynatrain.engine.buddies.kept import Kept
from ds_dynatrain.engine.buddies.replay import Replay
from ds_dynatrain.engine.buddies.replica import Replica
from ds_dynatrain.engine.buddies.shipping import Round, Ward
from ds_dynatrain.engine.buddies.taking import Taken, mark_of, take
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.feasible import available_bytes
from ds_dynatrain.engine.groups import BUDDIES
from ds_dynatrain.errors import ConfigError, DynatrainError, WorldChanged
from ds_dynatrain.plan import buddies_of, has_one_holder, memory_of_copies, wards_of
from ds_dynatrain.report import Protection, logger
from ds_dynatrain.support import usage
from ds_dynatrain.transfer import GroupTransport

MOST_OF_A_STEP = 0.02
"""In mode "auto": what a step may wait for copies, as a share of it."""
MILLIONTHS = 1_000_000
MOST_DIFFERENCES = 3
"""So often a replica may differ from its ward; from then on copies are taken."""
NEW_WORLD = "no copy of this world is whole yet"


class Buddies:
    """Of one engine, for the whole job. kept: the copies that this process has."""

    def __init__(self, engine: EngineCore) -> None:
        self.kept = Kept()
        self._engine, self._settings = engine, engine.settings.buddies
        self._every = self._settings.every_steps
        self._world: World | None = None
        self._buddies: tuple[int, ...] = ()
        self._pairs: dict[int, int] = {}
        """The same by members."""
        self._why = NEW_WORLD
        self._is_protected = False
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
        self._replays = False
        """Whether buddies replay steps in this world, once the copies of a moment are whole."""
        self._replay: Replay | None = None
        self._differences = 0

    def check(self) -> None:
        """The first world. UnsupportedError if its steps cannot be replayed as is asked for, ConfigError if the host
        memory of this node is too small for its copies."""
        if self._settings.mode == "replay" and (why := _why_not_replayed(self._engine)):
            raise usage("buddies that replay steps").error(why)
        engine, nodes = self._engine, self._engine.candidates.nodes
        where, mine = [nodes[member] for member in engine.members], nodes[engine.control.member]
        needs = memory_of_copies(engine.vps, engine.layout, where)
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
        if self._replay is not None:
            self._replay.put_aside()
            self._replay = None

    def forget(self) -> None:
        """Training goes on from another state, on all members: no copy from before counts."""
        self.kept.forget()
        self._replay = None
        self._is_protected, self._why = False, "another state was loaded: no copy of it is whole yet"
        if self._round is not None:
            self._round.is_void = True

    def _look(self) -> None:
        if self._world is not self._engine.world:
            self._enter()
        if self._replays and self._buddies:
            self._look_at_replay()
            return
        step = self._engine.global_steps
        is_due = bool(self._buddies) and (self._next is None or step >= self._next)
        if not is_due and self._round is None:
            return
        if self._round is not None:
            self._see(self._round)
        if is_due:
            self._next = step + self._every
            if self._round is None:
                self._begin()
            else:
                self._skipped += 1

    def _enter(self) -> None:
        """Another world: who keeps whose copies there. Who has just come knows of no longer interval of the others'."""
        self._replay = None
        self.settle()
        self._every = self._settings.every_steps
        engine, self._round, self._next = self._engine, None, None
        self._world, self._is_protected, self._buddies, self._pairs = engine.world, False, (), {}
        vps, layout = engine.vps, engine.layout
        if layout.world_size == 1:
            self._why = "one member alone works: nobody could keep its copy"
        elif not any(has_one_holder(vps, layout, kind) for kind in vps.present_kinds()):
            self._is_protected, self._why = True, f"in {layout} every element has several holders: nothing is copied"
        else:
            self._buddies = buddies_of([engine.candidates.nodes[member] for member in engine.members])
            self._why = NEW_WORLD
            members = engine.members
            self._pairs = {members[rank]: members[buddy] for rank, buddy in enumerate(self._buddies)}
        if not self._buddies and engine.rank == 0:
            logger.info("buddies: %s", self._why)
        self._choose()

    # ---- steps that are replayed -------------------------------------------------------------------------------------

    def watched_step(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        engine, replay = self._engine, self._replay
        if replay is None or replay.mark.registered != len(engine.registered):
            return nullcontext()
        return watched_step(engine.host.optimizer, replay)

    def finish_step(self) -> None:
        """See `Replay.finish`."""
        if self._replay is not None:
            self._replay.finish()

    def _choose(self) -> None:
        """Whether steps are replayed in this world; all choose alike."""
        self._replays = self._settings.mode == "replay" and self._differences < MOST_DIFFERENCES
        if self._replays and self._buddies and (why := _why_not_replayed(self._engine)):
            self._replays = False
            if self._engine.rank == 0:
                logger.warning("buddies: copies are taken in this world, and no steps are replayed: %s", why)

    def _look_at_replay(self) -> None:
        """All that is replayed begins with copies of one moment, which a step waits for."""
        if self._replay is not None and self._is_right(self._replay):
            self._replay.note()
            self._take_seconds, self._ship_seconds = self._replay.seconds, self._replay.ship_seconds
            self._sent_bytes, self._taken = self._replay.sent_bytes, self._taken + 1
            return
        self._replay = None
        if not self._replays:
            return  # copies begin at the next boundary
        self._begin()
        if self._thread is not None:
            self._thread.join()
        if self._round is not None:
            self._see(self._round)
        if self.kept.whole == mark_of(self._engine):
            self._begin_replay()

    def _is_right(self, replay: Replay) -> bool:
        """On all members alike."""
        if not replay.is_sound:
            return False
        if replay.mark.step % self._settings.verify_every_steps or replay.verify():
            return True
        self.kept.forget()
        self._differences += 1
        if self._differences >= MOST_DIFFERENCES:
            self._replays, self._is_protected, self._next = False, False, None
            self._why = f"replicas have differed {self._differences} times from what they are of: no copy is whole yet"
            if self._engine.rank == 0:
                logger.error("buddies: %s; from here on copies are taken, and no steps are replayed", self._why)
        return False

    def _begin_replay(self) -> None:
        """From the copies of this moment, which all have whole."""
        engine, world, mark = self._engine, self._engine.world, mark_of(self._engine)
        if world is None or world.status is None:
            return
        members, rank = engine.members, engine.rank
        wards = [(ward, self.kept.find(mark, ward)) for ward in wards_of(self._buddies, rank)]
        replicas = [Replica(engine, copy, members[ward]) for ward, copy in wards if copy is not None]
        ways = GroupTransport(world.group(BUDDIES), members), world.default, world.status
        self._replay = Replay(engine, mark, members[self._buddies[rank]], replicas, *ways)
        self.kept.hand_over(self._replay.copies)
        if rank == 0:
            logger.info("buddies: they make each other's steps after step %d: a death loses none", mark.step)

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
        self._round = Round(mark, taken, members[self._buddies[rank]], kept_here, transport, self.kept)
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
        self._tell(found, bool(is_whole))
        if self._settings.mode == "auto":
            self._every = max(self._settings.every_steps, math.ceil(-share / MILLIONTHS / MOST_OF_A_STEP))

    def _tell(self, found: Round, is_whole: bool) -> None:
        """Once of each thing that has changed."""
        step = found.mark.step
        if found.error != self._last_error:
            self._last_error = found.error
            if found.error:
                logger.error("buddies: the copies of step %d are not whole: %s", step, found.error)
        if is_whole == self._is_protected:
            return
        self._is_protected, self._why = is_whole, "" if is_whole else f"the copies of step {step} are not whole"
        if self._engine.rank == 0 and is_whole:
            logger.info("buddies: protected from step %d on: the death of a member loses no more than follows it", step)
        elif self._engine.rank == 0:
            logger.warning("buddies: unprotected: %s", self._why)

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
        is_other = self._settings.mode == "replay" and bool(self._buddies) and not self._replays
        return "copy" if is_other else self._settings.mode

    @property
    def protection(self) -> Protection:
        """For people, and for scripts that watch."""
        whole = self.kept.whole if self._replay is None else self._replay.mark
        is_known = self._world is self._engine.world
        return Protection(
            mode=self._mode,
            buddies=dict(self._pairs) if is_known else {},
            step=None if whole is None else whole.step,
            is_protected=is_known and self._is_protected,
            why=self._why if is_known else NEW_WORLD,
            every_steps=self._every,
            memory_bytes=self.kept.nbytes + (0 if self._replay is None else self._replay.nbytes),
            sent_bytes=self._sent_bytes,
            take_ms=1e3 * self._take_seconds,
            ship_ms=1e3 * self._ship_seconds,
            taken=self._taken,
            skipped=self._skipped,
        )


def _why_not_replayed(engine: EngineCore) -> str:
    """Why buddies cannot make each other's steps in the present world; nothing if they can."""
    layout = engine.layout
    wide = [f"{axis}={size}" for axis, size in layout.axes().items() if axis != "data" and size > 1]
    if layout.zero_stage == 0:
        return "at ZeRO stage 0 nobody has a part of the state that others could step"
    if wide:
        return f"in a layout with {', '.join(wide)} steps are not replayed yet"
    return why_not(engine.host.optimizer, engine.host.basic_optimizer)
