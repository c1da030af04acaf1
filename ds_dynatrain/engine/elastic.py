"""Membership of this process in a job whose members come and go: receiving changes of members, and aborting lost
worlds.

The coordinator (`ds_dynatrain.elastic`) publishes the list of members; `membership.boundary_machine` decides between
two optimizer steps what follows from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.groups.communicators import unfinished
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.environment import WorkerPlace, job_token
from ds_dynatrain.elastic.generation import Generation, node_of
from ds_dynatrain.elastic.main_thread import OWN_WAITS, stands_at
from ds_dynatrain.elastic.member import Member
from ds_dynatrain.elastic.token import derive
from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.membership.control import Control, Seal, Teardowns
from ds_dynatrain.membership.destinations import Registry
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.context import Boards, Candidates, Context
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.membership import Membership

CONNECT_SECONDS = 2.0
WAITING = (
    "torch.distributed",
    "ds_dynatrain.adapters.groups.managed_process_group",
    "ds_dynatrain.transfer",
)
"""Modules in which the main thread waits for other members: in a collective, in a transfer, or for a group to agree on
results."""
REOPEN_SECONDS = 0.5
REPLACED = "replaced"
NOBODY = -1
"""Sentinel for the number of a member that has no number yet."""


class Elastic(Membership):
    """Membership that receives new generations and notices lost worlds; `ElasticMembership` adds the engines.

    world: the generation that this member has entered; None before the first one.
    registry: the numbers of that generation's members.
    is_aborted: whether the current world can no longer be used, because a member of it died or a collective of it
        failed.
    loads: a map from an engine's number to the result of the job's own `load_checkpoint` call.
    is_newcomer: whether this member joined a running job.
    engine_count: the number of engines of the running job that a newcomer joined.
    restores: whether this member starts a job whose state is lost.
    """

    def __init__(self, place: WorkerPlace, settings: DynatrainConfig) -> None:
        self._token, _ = job_token(place.coordinator)
        self.member = Member(place, self._token, self._hear, waits_in=WAITING, hangs_in=self._hangs_in)
        self.configure(settings)
        self.world: Generation | None = None
        self.registry = Registry()
        self.is_aborted = False
        self.loads: dict[int, Any] = {}
        self.is_newcomer, self.engine_count = False, 1
        self.restores = False
        self.ending = ""
        """Reason to end the job on all members, because collectives hang repeatedly; "" if there is none."""
        self._training: frozenset[str] = frozenset()
        self._is_in_window = False
        self._aborted_at = 0
        self._blocked_seconds = 0.0
        """Seconds for which the main thread had run no Python code when the last heartbeat was sent."""
        self._present: dict[int, WorldSockets] = {}
        self._coming: dict[int, WorldSockets] = {}
        self._teardowns = Teardowns()
        self._lock = threading.Lock()

    def configure(self, settings: DynatrainConfig) -> None:
        """Use these settings from now on. Called before the first generation is entered."""
        self.timeout_seconds = settings.timeout_seconds
        self.wait_seconds = settings.elastic.wait_for_members_seconds
        self.collective_seconds = settings.elastic.collective_seconds

    # ---- worlds --------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the generation that this member has entered; 0 before the first one."""
        return 0 if self.world is None else self.world.generation

    def is_harmless(self, world: Generation) -> bool:
        """Return whether the current world can continue although a later generation was published.

        After a failure it can continue if the later generation includes all members that train now, and if no
        collective of the current world has failed. A planned change always includes all of these; it is harmful only if
        it does not list this member, which shows that the current job was started by mistake. While a late switch is in
        progress (optimizer state is in transit), no failure is harmless, because all members of both worlds are needed.

        world: the later generation.
        """
        if self._is_in_window and world.change == "failure":
            return False
        there = {*world.members, *world.leaving}
        if 0 < self.generation <= world.broken:
            return False
        is_known = self.generation == 0 or self.member.id in there
        return is_known if world.change == "planned" else self._training <= there

    def is_over(self, generation: int) -> bool:
        """Return whether a failure was published after this generation, so that the generation's process groups need
        not be built any more."""
        newest = self.member.newest
        return newest is not None and newest.generation > generation and newest.change == "failure"

    def stop_if_over(self, generation: int) -> None:
        """Raise WorldChanged if a failure was published after this generation.

        Cheap. Call it in polling loops, because dead members never answer.
        """
        if self.is_over(generation):
            newest = self.member.newest
            raise WorldChanged("a failure came in between" if newest is None else newest.reason)

    def _stop_if_aborted_after(self, generation: int) -> None:
        if self._aborted_at > generation:
            raise WorldChanged("a member of this world is dead, or a collective of it has failed")

    def enter(self, world: Generation, registry: Registry, training: frozenset[str]) -> None:
        """Make a generation the current one.

        registry: the numbers of the generation's members.
        training: the ids of the members that now hold the state.
        """
        with self._lock:
            self.world, self.registry, self._training = world, registry.only(world.members), training
            self.is_aborted = False
            self._see_newest(world.generation)
        if self.member.id in world.members:
            self.member.enter(world)

    def retrain(self, members: tuple[int, ...]) -> None:
        """Record which members of the generation hold the state from now on. If one of them dies, the world is
        aborted."""
        with self._lock:
            self._training = self.registry.ids_of(members)
            self._see_newest(self.generation)

    def enter_window(self, generation: int) -> None:
        """Record that a late switch is in progress, which lasts until all optimizer state has arrived.

        Meanwhile any failure published after this generation aborts the world. `settle` or `let_go` ends this period.
        """
        with self._lock:
            self._is_in_window = True
            self._see_newest(generation)

    def _see_newest(self, generation: int) -> None:
        """Abort the world if a generation later than the given one was published and is not harmless; see
        `is_harmless`."""
        newest = self.member.newest
        if newest is not None and newest.generation > generation and not self.is_harmless(newest):
            self._lose_present(newest)

    def abort(self) -> None:
        """Abort the world, because it is unknown what state the other members hold. All members report this in a new
        generation."""
        with self._lock:
            self._lose_present(None)
            self.member.breach()

    def _lose_present(self, newest: Generation | None) -> None:
        """Give up the current world: shut down its process groups.

        newest: the generation that reports the loss; None if no generation reports it.
        """
        self.is_aborted = True
        if newest is not None:
            self._aborted_at = newest.generation
        self.lose()
        for sockets in list(self._present.values()):
            sockets.abort()

    def breach(self) -> None:
        """Report a failed collective to the coordinator, so that all members learn of it. Does nothing if the world is
        already aborted."""
        with self._lock:
            if not self.is_aborted:
                self.member.breach()

    def _hear(self, world: Generation) -> bool:
        """Process a new generation; return whether the current world is aborted because of it.

        Called on the member's own thread, before any other thread learns of the generation.
        """
        if world.hangs:
            self._say_where(world)
        if world.change == "failure":
            self.abandon()
            for sockets in list(self._coming.values()):
                sockets.abort()
        with self._lock:
            if self.is_harmless(world):
                return False
            self._lose_present(world)
            return True

    def _hangs_in(self, blocked_seconds: float) -> str:
        """Return a description of the collective in which the main thread has waited for at least `collective_seconds`;
        "" if there is none.

        blocked_seconds: the time for which the main thread has run no Python code.
        """
        self._blocked_seconds = blocked_seconds
        what, seconds = self.waits(blocked_seconds)
        if seconds < self.collective_seconds or self.is_aborted or str(OWN_WAITS):
            return ""
        return f"{unfinished() or what}, {seconds:.0f} s"

    def _say_where(self, world: Generation) -> None:
        """Log where the main thread is when a collective hangs. If collectives hang repeatedly, also set `ending`, so
        that the job ends."""
        what, seconds = self.waits(self._blocked_seconds)
        here = [f"{what}, {seconds:.0f} s" if what else "no collective", f"at {stands_at()}", unfinished()]
        logger.error("%s; the main thread here is in %s", world.reason, "; ".join(filter(None, here)))
        if world.hangs > 1:
            self.ending = (
                f"{world.reason}, again within a few steps of the last time; the log of each member says where it was; "
                "look for a collective that not all ranks call alike, or give dynatrain.elastic.collective_seconds "
                f"more than {self.collective_seconds:g}, if a rank may take that long"
            )

    # ---- process groups ------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Forbid new collectives in the worlds of this process. Does nothing here, because this class has no engines;
        overridden by `ElasticMembership`."""

    def abandon(self) -> None:
        """End all operations in the worlds of engines that are still being made. Does nothing here; overridden by
        `ElasticMembership`."""

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return a description of what the main thread waits for in the worlds of this process, and for how many
        seconds it has waited; see `Gate.waits`."""
        return "", 0.0

    @contextmanager
    def building_first(self, generation: int, engine: int) -> Iterator[None]:
        """Context manager for building an engine's first process groups. After its block they are the engine's current
        ones.

        generation: the generation of the membership; a failure published after it aborts the building.
        engine: the engine's number.
        """
        with self.building(generation, engine):
            yield
        self.settle(engine)

    def building(self, generation: int, engine: int = 1) -> AbstractContextManager[None]:
        """Return a context manager for building the process groups of an engine's next world. A failure that is
        published after this generation aborts the building.

        engine: the engine's number.
        """
        return self._coming.setdefault(engine, WorldSockets()).building(lambda: not self.is_over(generation))

    def building_more(self, engine: int = 1) -> AbstractContextManager[None]:
        """Return a context manager for building further process groups of the current world.

        engine: the engine's number.
        """
        return self._present.setdefault(engine, WorldSockets()).building(lambda: not self.is_aborted)

    def settle(self, engine: int = 1) -> None:
        """Make the world last built for an engine its current world. If a late switch was in progress, it is over.

        engine: the engine's number.
        """
        with self._lock:
            self._is_in_window = False
            if engine in self._coming:
                self._present[engine] = self._coming.pop(engine)

    def let_go(self, engine: int = 1) -> None:
        """Forget the world last built for an engine. If a late switch was in progress, it is over.

        engine: the engine's number.
        """
        with self._lock:
            self._is_in_window = False
        if engine in self._coming:
            self._coming[engine].forget()

    # ---- boards -------------------------------------------------------------------------------------------

    def open_boards(
        self, world: Generation, number: int = NOBODY, seconds: float | None = None, engine: int = 1
    ) -> Boards:
        """Open two connections to an engine's board (key-value store) of a generation: one for the main thread, one for
        background work.

        number: this member's number, if it is known.
        engine: the engine's number.

        Raises torch's DistError if the coordinator's store cannot be reached.
        """
        boards, prefix = [], "board" if engine == 1 else f"board{engine}"
        for _ in range(2):
            store = self.member.store(world.prefix, CONNECT_SECONDS if seconds is None else seconds)
            store.set_timeout(timedelta(seconds=self.timeout_seconds))
            watch = partial(self._stop_if_aborted_after, world.generation)
            given = self.timeout_seconds, watch, self._seal(world.prefix), self._teardowns
            boards.append(Control(store, prefix, number, *given))
        return boards[0], boards[1]

    def _seal(self, name: str) -> Seal | None:
        """Return the object that authenticates records on boards with a prefix; None in a job without a token.

        name: the prefix.
        """
        return None if self._token is None else Seal(derive(self._token, f"board {name}"))

    # ---- records for the whole job -------------------------------------------------------------------------------

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """Post that a state, such as a checkpoint, was loaded. Copies taken before that no longer count.

        stretch: the `Mark.stretch` of copies taken from now on.

        Raises torch's DistError if the store cannot be reached.
        """
        if self.world is not None:
            self._job_board(self.world).post(REPLACED, list(stretch))

    def replaced(self) -> tuple[int, ...] | None:
        """Return the newest value that a member has posted with `say_replaced`; () if there is none, None if it is
        unknown.

        It is unknown if the store cannot be reached. It is also unknown if the coordinator was restarted since this
        member entered its generation, because the new coordinator's store is empty.
        """
        newest = self.member.newest
        if self.world is None or newest is None or newest.term != self.world.term:
            return None
        try:
            return tuple(self._job_board(self.world).read(REPLACED) or ())
        except (td.DistError, OSError):
            return None

    def _job_board(self, world: Generation) -> Control:
        store = self.member.store(f"job/{world.term}", CONNECT_SECONDS)
        return Control(store, "board", NOBODY, self.timeout_seconds, seal=self._seal(f"job/{world.term}"))

    def candidates(self, world: Generation, registry: Registry) -> Candidates:
        """Return the members of a generation and their nodes. These are the members that could get a rank in a
        layout."""
        mine = registry.numbers.get(self.member.id, NOBODY)
        return Candidates(mine, {registry.numbers[member]: node_of(member) for member in world.members})


class GenerationBoards:
    """Boards (key-value stores) of a later generation, one for each engine of this process.

    engines: the engines' numbers.

    The boards are opened in a thread, because the store may be slow or unreachable.
    """

    def __init__(self, world: Generation, elastic: Elastic, engines: Sequence[int]) -> None:
        self.world = world
        self._elastic = elastic
        self._engines = tuple(engines)
        self._opened: tuple[Boards, ...] = ()
        self._is_over = threading.Event()
        threading.Thread(target=self._open, name=f"dynatrain-board-{world.generation}", daemon=True).start()

    def close(self) -> None:
        """Stop trying to open the boards."""
        self._is_over.set()

    @property
    def main_boards(self) -> tuple[Control, ...]:
        """Connections for the main thread to the boards, one for each engine; () until they are open."""
        return tuple(front for front, _ in self._opened)

    def of(self, engine: int = 0) -> Boards:
        """Return the connections to the board of one engine. Raises RuntimeError until they are open.

        engine: the index of the engine in the process.
        """
        if not self._opened:
            raise RuntimeError(f"the board of generation {self.world.generation} is not open")
        return self._opened[engine]

    def know(self, registry: Registry) -> None:
        """Set this member's number, as given by the registry, on all of these key-value stores."""
        for boards in self._opened:
            for board in boards:
                board.member = registry.numbers[self._elastic.member.id]

    def adopt(self, engine: EngineCore, place: int, candidates: Candidates) -> None:
        """Make an engine use these key-value stores from now on.

        place: the engine's index in the process.
        """
        engine.context = Context(engine.launch, candidates, *self.of(place))

    def _open(self) -> None:
        opened: list[Boards] = []
        while not self._is_over.is_set():
            try:
                for engine in self._engines[len(opened) :]:
                    opened.append(self._elastic.open_boards(self.world, engine=engine))
            except (td.DistError, OSError) as error:
                logging.getLogger("ds_dynatrain.elastic").info("generation %d: %s", self.world.generation, error)
                self._is_over.wait(REOPEN_SECONDS)
                continue
            self._opened = tuple(opened)
            return
