"""On the way to a later generation: its notice board, and how far this member has come."""

from __future__ import annotations

import logging
import threading

import torch.distributed as td

from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.members.elastic import Boards, Elastic
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.surroundings import Candidates

REOPEN_SECONDS = 0.5


class Change:
    """On the way to a later generation, on one member. Its board is opened in a thread: the store may be slow, or away.

    proposal: what is tried now, None in between. tries: attempts that were rolled back. restores: nobody has the whole
    state any more, and it comes from a checkpoint.
    """

    def __init__(self, world: World, elastic: Elastic) -> None:
        self.world = world
        self.roll: Roll | None = None
        self.tries = 0
        self.proposal: Proposal | None = None
        self.has_led = self.has_said = self.is_adopted = self.is_agreed = self.restores = False
        self._elastic = elastic
        self._boards: Boards | None = None
        self._is_over = threading.Event()
        self.open()

    def open(self) -> None:
        """Connect, or connect again: what was read before does not count any more."""
        self._boards, self.proposal, self.tries = None, None, 0
        self.has_led = self.has_said = self.is_adopted = False
        threading.Thread(target=self._open, name=f"dynatrain-board-{self.world.generation}", daemon=True).start()

    def close(self) -> None:
        """Do not try any longer."""
        self._is_over.set()

    @property
    def boards(self) -> Boards | None:
        """None while they are not open."""
        return self._boards

    @property
    def board(self) -> Control:
        """For the main thread; RuntimeError while it is not open."""
        if self._boards is None:
            raise RuntimeError(f"the notice board of generation {self.world.generation} is not open")
        return self._boards[0]

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
        for board in self._boards or ():
            board.member = roll.numbers[self._elastic.member.id]

    def _open(self) -> None:
        while not self._is_over.is_set():
            try:
                boards = self._elastic.open_boards(self.world)
            except (td.DistError, OSError) as error:
                logging.getLogger("ds_dynatrain.elastic").info("generation %d: %s", self.world.generation, error)
                self._is_over.wait(REOPEN_SECONDS)
                continue
            self._boards = boards
            return
