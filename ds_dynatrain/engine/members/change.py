"""On the way to a later generation: its notice boards, and how far this member has come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch.distributed as td

from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.surroundings import Boards, Candidates

REOPEN_SECONDS = 0.5


class Change:
    """On the way to a later generation, on one member. Boards are opened in a thread: the store may be slow, or away.

    engines: the numbers of this process's engines; each has boards of its own, and what concerns all of them is said on
    those of the first. proposals: what is tried now, one for each engine, none in between. tries: attempts that were
    rolled back. restores: nobody has the whole state any more, and it comes from a checkpoint.
    """

    def __init__(self, world: World, elastic: Elastic, engines: Sequence[int] = (1,)) -> None:
        self.world = world
        self.roll: Roll | None = None
        self.tries = 0
        self.proposals: tuple[Proposal, ...] = ()
        self.has_led = self.has_said = self.is_adopted = self.is_agreed = self.restores = False
        self._elastic = elastic
        self._engines = tuple(engines)
        self._boards: dict[int, Boards] = {}
        self._is_over = threading.Event()
        self.open()

    def open(self) -> None:
        """Connect, or connect again: what was read before does not count any more."""
        self._boards, self.proposals, self.tries = {}, (), 0
        self.has_led = self.has_said = self.is_adopted = False
        threading.Thread(target=self._open, name=f"dynatrain-board-{self.world.generation}", daemon=True).start()

    def close(self) -> None:
        """Do not try any longer."""
        self._is_over.set()

    @property
    def is_open(self) -> bool:
        """Whether the boards are there."""
        return bool(self._boards)

    @property
    def board(self) -> Control:
        """For the main thread, that of the first engine; RuntimeError while it is not open."""
        return self.boards_of(self._engines[0])[0]

    def boards_of(self, engine: int) -> Boards:
        """Those of the engine with that number; RuntimeError while they are not open."""
        if not self._boards:
            raise RuntimeError(f"the notice board of generation {self.world.generation} is not open")
        return self._boards[engine]

    @property
    def proposal(self) -> Proposal | None:
        """That of the first engine, which speaks for the others."""
        return self.proposals[0] if self.proposals else None

    @property
    def moves_nothing(self) -> bool:
        """Whether all engines stay as they are."""
        return all(proposal.moves_nothing for proposal in self.proposals)

    @property
    def known(self) -> Roll:
        """The numbers as far as they are known: those of the present generation, until `know`."""
        return self._elastic.roll if self.roll is None else self.roll

    @property
    def candidates(self) -> Candidates:
        """Its members as those that could work."""
        return self._elastic.candidates(self.world, self.known)

    def know(self, roll: Roll) -> None:
        """Take the numbers of everybody in it, this member's own among them."""
        self.roll = roll
        for boards in self._boards.values():
            for board in boards:
                board.member = roll.numbers[self._elastic.member.id]

    def _open(self) -> None:
        opened: dict[int, Boards] = {}
        while not self._is_over.is_set():
            try:
                for engine in self._engines:
                    if engine not in opened:
                        opened[engine] = self._elastic.open_boards(self.world, engine=engine)
            except (td.DistError, OSError) as error:
                logging.getLogger("ds_dynatrain.elastic").info("generation %d: %s", self.world.generation, error)
                self._is_over.wait(REOPEN_SECONDS)
                continue
            self._boards = opened
            return
