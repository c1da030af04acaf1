"""How a process leaves the job: its state is with others, or saved where nobody is there to take it over."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as td

from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.engine.switcher import Switcher
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.report import logger


class Parting:
    """The engines of a process in an elastic job, and what they save. engines: in the order in which they were made."""

    def __init__(self, elastic: Elastic) -> None:
        self.engines: list[EngineParts] = []
        self.elastic = elastic

    @property
    def engine(self) -> EngineParts:
        """The first one, which speaks for all."""
        return self.engines[0]

    @property
    def switcher(self) -> Switcher:
        """That of the first engine."""
        return self.engine.switcher

    @property
    def beside(self) -> list[EngineParts]:
        """The other engines."""
        return self.engines[1:]

    def save(self, how: Callable[[], None]) -> None:
        """The fallback checkpoint; without a coordinator it is put off."""
        try:
            how()
        except WorldChanged as torn:
            logger.warning("no fallback checkpoint of step %d: %s", self.engine.global_steps, torn)
        except td.DistError as lost:
            self.engine.settle_fallback()
            try:
                for engine in self.engines:
                    self.reopen(engine)
            except SwitchRefused:
                logger.warning("no fallback checkpoint of step %d: %s", self.engine.global_steps, lost)

    def go(self) -> None:
        """This member has handed over what it had; its process ends."""
        logger.info("%s: its state is with others; it leaves", self.elastic.member.id)
        raise SystemExit(0)

    def save_and_go(self) -> None:
        """All members were told to go, and stand at one step; their processes end."""
        engine = self.engine
        if engine.settings.fallback is not None:
            self.save(engine.fallback.save_now)
        elif engine.rank == 0:
            logger.error(
                "all members were told to leave, and nobody is there to take the state over: nothing of step %d was "
                "saved; to have it saved, configure dynatrain.fallback.path",
                engine.global_steps,
            )
        logger.info("%s: nobody goes on; it leaves", self.elastic.member.id)
        raise SystemExit(0)

    def reopen(self, engine: EngineCore) -> None:
        """Have a living board of an engine for the present generation, after a coordinator was started again.

        SwitchRefused if there is none.
        """
        world = self.elastic.world
        try:
            for board in (engine.control, engine.surroundings.background):
                board.read("alive")
        except td.DistError as lost:
            if world is None:
                raise SwitchRefused(f"the notice board is gone: {lost}", "ask again later") from lost
            try:
                boards = self.elastic.open_boards(world, engine.control.member, engine=engine.job.number)
            except (td.DistError, OSError) as error:
                raise SwitchRefused(f"no coordinator answers: {error}", "training goes on; ask again later") from error
            boards[0].succeed(engine.control)
            engine.surroundings = Surroundings(engine.launch, engine.candidates, *boards)
