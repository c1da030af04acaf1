"""This process as a member of a job whose members come and go: what it hears, and what it aborts at once.

The coordinator says who is there (`ds_dynatrain.elastic`); `changes` does what follows from it at the boundaries.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.communicators import unfinished
from ds_dynatrain.adapters.worlds import Note
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.environment import WorkerPlace, job_token
from ds_dynatrain.elastic.main_thread import OWN_WAITS, stands_at
from ds_dynatrain.elastic.member import Member
from ds_dynatrain.elastic.token import derive
from ds_dynatrain.elastic.world import World, node_of
from ds_dynatrain.engine.context import Boards, Candidates, Context
from ds_dynatrain.engine.control import Control, Seal, Teardowns
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.members.destinations import Registry
from ds_dynatrain.engine.members.membership import Membership
from ds_dynatrain.errors import WorldChanged
from ds_dynatrain.report import logger

CONNECT_SECONDS = 2.0
WAITING = ("torch.distributed", "ds_dynatrain.adapters.watched", "ds_dynatrain.adapters.gate", "ds_dynatrain.transfer")
"""Where the main thread waits for other members: in a collective, at the gate, while a group is made, in a transfer."""
REOPEN_SECONDS = 0.5
REPLACED = "replaced"
NOBODY = -1
"""The number of a member that has not been told its own yet."""


class Elastic(Membership):
    """What a member hears, and which of its worlds are lost; `ElasticMembership` has the rest, about engines.

    world: the generation that this member has entered, None before the first. registry: the numbers of its members.
    is_aborted: a member of the world that trains is dead, or a collective of it failed: nothing of it can be used any
    more. loads: what the job's own `load_checkpoint` of an engine returned, if it was called, by the engine's number.
    is_newcomer: whether this member joined a running job; engine_count: how many engines the job has then. restores:
    whether it starts a job whose state is lost.
    """

    def __init__(self, place: WorkerPlace, settings: DynatrainConfig) -> None:
        self._token, _ = job_token(place.coordinator)
        self.member = Member(place, self._token, self._hear, waits_in=WAITING, hangs_in=self._hangs_in)
        self.configure(settings)
        self.world: World | None = None
        self.registry = Registry()
        self.is_aborted = False
        self.loads: dict[int, Any] = {}
        self.is_newcomer, self.engine_count = False, 1
        self.restores = False
        self.ending = ""
        """Why the job ends on all its members: collectives that do not end, again and again."""
        self._training: frozenset[str] = frozenset()
        self._is_in_window = False
        self._aborted_at = 0
        self._blocked_seconds = 0.0
        """For how long the main thread had run no Python code when the last heartbeat was sent."""
        self._present: dict[int, WorldSockets] = {}
        self._coming: dict[int, WorldSockets] = {}
        self._teardowns = Teardowns()
        self._lock = threading.Lock()

    def configure(self, settings: DynatrainConfig) -> None:
        """Go by these settings from now on; before the first generation is entered."""
        self.timeout_seconds = settings.timeout_seconds
        self.wait_seconds = settings.elastic.wait_for_members_seconds
        self.collective_seconds = settings.elastic.collective_seconds

    # ---- worlds --------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the generation that this member has entered; 0 before the first."""
        return 0 if self.world is None else self.world.generation

    def is_harmless(self, world: World) -> bool:
        """Whether all who train at present are there in a later generation, and their collectives can be trusted.

        A planned one has all of them, but for a member that it does not know: of a job that was begun by mistake. In
        the window of a late switch all of both worlds are needed, and no failure is harmless.
        """
        if self._is_in_window and world.change == "failure":
            return False
        there = {*world.members, *world.leaving}
        if 0 < self.generation <= world.broken:
            return False
        is_known = self.generation == 0 or self.member.id in there
        return is_known if world.change == "planned" else self._training <= there

    def is_over(self, generation: int) -> bool:
        """Whether a failure was published after that generation: what is being built for it will not come about."""
        newest = self.member.newest
        return newest is not None and newest.generation > generation and newest.change == "failure"

    def stop_if_over(self, generation: int) -> None:
        """Raise WorldChanged if it is over; for polls, which would wait for the dead."""
        if self.is_over(generation):
            newest = self.member.newest
            raise WorldChanged("a failure came in between" if newest is None else newest.reason)

    def _stop_if_aborted_after(self, generation: int) -> None:
        if self._aborted_at > generation:
            raise WorldChanged("a member of this world is dead, or a collective of it has failed")

    def enter(self, world: World, registry: Registry, training: frozenset[str]) -> None:
        """Be in a generation. training: the ids of those that hold the state now."""
        with self._lock:
            self.world, self.registry, self._training = world, registry.only(world.members), training
            self.is_aborted = False
            self._see_newest(world.generation)
        if self.member.id in world.members:
            self.member.enter(world)

    def retrain(self, members: tuple[int, ...]) -> None:
        """Others hold the state from here on, in the same generation: their deaths abort the world."""
        with self._lock:
            self._training = self.registry.ids_of(members)
            self._see_newest(self.generation)

    def enter_window(self, generation: int) -> None:
        """A late switch has begun, which a failure after that generation ends; see `settle` and `let_go`."""
        with self._lock:
            self._is_in_window = True
            self._see_newest(generation)

    def _see_newest(self, generation: int) -> None:
        """What was published after that generation may have been harmless to those who trained until now alone."""
        newest = self.member.newest
        if newest is not None and newest.generation > generation and not self.is_harmless(newest):
            self._lose_present(newest)

    def abort(self) -> None:
        """What the others hold is not known any more: all have to say it, in a new generation."""
        with self._lock:
            self._lose_present(None)
            self.member.breach()

    def _lose_present(self, newest: World | None) -> None:
        """The world that trains is lost: shut down what somebody waits in, or cannot be used any more.

        newest: the generation that says so, which has all that are not gone; None where nothing can be trusted.
        """
        self.is_aborted, present = True, list(self._present.values())
        there = set() if newest is None else {*newest.members, *newest.leaving}
        if newest is not None:
            self._aborted_at = newest.generation
        known = {name for sockets in present for name in sockets.groups}
        resting = self.lose(known, {number for one, number in self.registry.numbers.items() if one in there})
        for sockets in present:
            sockets.abort(resting)

    def breach(self) -> None:
        """A collective of the world that trains has failed, and nothing was heard of a reason yet: all have to know."""
        with self._lock:
            if not self.is_aborted:
                self.member.breach()

    def _hear(self, world: World) -> bool:
        """On the member's thread, before anybody else learns of a generation; whether it aborts the one that trains."""
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
        """Return the collective that the main thread has waited in for `collective_seconds`; empty if there is none."""
        self._blocked_seconds = blocked_seconds
        what, seconds = self.waits(blocked_seconds)
        if seconds < self.collective_seconds or self.is_aborted or str(OWN_WAITS):
            return ""
        return f"{unfinished() or what}, {seconds:.0f} s"

    def _say_where(self, world: World) -> None:
        """Log where the main thread is while a collective of the world does not end."""
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

    def lose(self, known: Collection[str], there: Collection[int]) -> Collection[str]:
        """Let the worlds of this process begin nothing any more.

        known: names of groups that could be left alone; there: numbers of members that are not gone. Returns those
        that may stay; see `adapters.World.lose`. While there are no engines no group may.
        """
        return ()

    def abandon(self) -> None:
        """End what is under way in a world in which an engine is being made."""

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return what the main thread waits for, and for how long; see `Gate.waits`."""
        return "", 0.0

    @contextmanager
    def building(self, generation: int, engine: int = 1) -> Iterator[Note]:
        """Around the building of an engine's world: a failure after that generation aborts it. engine: its number.

        Gives what is told of each group that was built.
        """
        with self._coming.setdefault(engine, WorldSockets()).building(lambda: not self.is_over(generation)) as note:
            yield note

    @contextmanager
    def building_first(self, generation: int, engine: int) -> Iterator[Note]:
        """Around the building of an engine's first world, which trains then."""
        with self.building(generation, engine) as note:
            yield note
        self.settle(engine)

    @contextmanager
    def building_more(self, engine: int = 1) -> Iterator[Note]:
        """Around the building of further groups of the world that trains; as `building`."""
        with self._present.setdefault(engine, WorldSockets()).building(lambda: not self.is_aborted) as note:
            yield note

    def settle(self, engine: int = 1) -> None:
        """The world that was built last for an engine is the one that trains now."""
        with self._lock:
            self._is_in_window = False
            if engine in self._coming:
                coming = self._coming.pop(engine)
                if engine in self._present:
                    coming.take_over(self._present[engine])
                self._present[engine] = coming

    def let_go(self, engine: int = 1) -> None:
        """The world that was built last for an engine is gone again."""
        with self._lock:
            self._is_in_window = False
        if engine in self._coming:
            self._coming[engine].forget()

    # ---- boards -------------------------------------------------------------------------------------------

    def open_boards(self, world: World, number: int = NOBODY, seconds: float | None = None, engine: int = 1) -> Boards:
        """An engine's board of a generation, twice.

        torch's DistError if the coordinator's store cannot be reached.
        """
        boards, prefix = [], "board" if engine == 1 else f"board{engine}"
        for _ in range(2):
            store = self.member.store(world, CONNECT_SECONDS if seconds is None else seconds)
            store.set_timeout(timedelta(seconds=self.timeout_seconds))
            watch = partial(self._stop_if_aborted_after, world.generation)
            given = self.timeout_seconds, watch, self._seal(world.prefix), self._teardowns
            boards.append(Control(store, prefix, number, *given))
        return boards[0], boards[1]

    def _seal(self, name: str) -> Seal | None:
        """Of boards; without a token there is nothing to seal them with."""
        return None if self._token is None else Seal(derive(self._token, f"board {name}"))

    # ---- what outlives generations -------------------------------------------------------------------------------

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """A state is loaded in that stretch of training; torch's DistError if the store cannot be reached."""
        if self.world is not None:
            self._job_board(self.world).post(REPLACED, list(stretch))

    def replaced(self) -> tuple[int, ...] | None:
        """The newest stretch of which that was said since this member has entered its generation, or before in the
        coordinator's present run; None if that is not known.

        It is not where the store cannot be reached, and not in the run of another coordinator, whose store is empty.
        """
        newest = self.member.newest
        if self.world is None or newest is None or newest.term != self.world.term:
            return None
        try:
            return tuple(self._job_board(self.world).read(REPLACED) or ())
        except (td.DistError, OSError):
            return None

    def _job_board(self, world: World) -> Control:
        store = self.member.job_store(world, CONNECT_SECONDS)
        return Control(store, "board", NOBODY, self.timeout_seconds, seal=self._seal(f"job/{world.term}"))

    def candidates(self, world: World, registry: Registry) -> Candidates:
        """The members of a generation as those that could work."""
        mine = registry.numbers.get(self.member.id, NOBODY)
        return Candidates(mine, {registry.numbers[member]: node_of(member) for member in world.members})


class GenerationBoards:
    """The boards of a later generation, one for each engine of this process. engines: their numbers.

    They are opened in a thread: the store may be slow, or away.
    """

    def __init__(self, world: World, elastic: Elastic, engines: Sequence[int]) -> None:
        self.world = world
        self._elastic = elastic
        self._engines = tuple(engines)
        self._opened: tuple[Boards, ...] = ()
        self._is_over = threading.Event()
        threading.Thread(target=self._open, name=f"dynatrain-board-{world.generation}", daemon=True).start()

    def close(self) -> None:
        """Do not try any longer."""
        self._is_over.set()

    @property
    def fronts(self) -> tuple[Control, ...]:
        """One for each engine, to be read and written here; none while they are not open."""
        return tuple(front for front, _ in self._opened)

    def of(self, engine: int = 0) -> Boards:
        """Those of an engine, by its place among those of the process; RuntimeError while they are not open."""
        if not self._opened:
            raise RuntimeError(f"the board of generation {self.world.generation} is not open")
        return self._opened[engine]

    def know(self, registry: Registry) -> None:
        """Speak by these numbers."""
        for boards in self._opened:
            for board in boards:
                board.member = registry.numbers[self._elastic.member.id]

    def adopt(self, engine: EngineCore, place: int, candidates: Candidates) -> None:
        """They are the engine's from here on. place: among those of the process."""
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
