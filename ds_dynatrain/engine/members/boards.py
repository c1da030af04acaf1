"""The boards of a later generation. They are opened in a thread: the store may be slow, or away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch.distributed as td

from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.context import Boards, Candidates, Context
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.registry import Registry

REOPEN_SECONDS = 0.5


class GenerationBoards:
    """Those of one generation, one for each engine of this process. engines: their numbers."""

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
