"""Membership of a job whose members come and go."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ds_dynatrain.adapters.incoming import refuse_cut
from ds_dynatrain.adapters.watched import Fate
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.liveness import EndedWatch, ended_in_error, post_end
from ds_dynatrain.engine.members.changes import Changes
from ds_dynatrain.engine.members.description import plain_part
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.loss import guarded
from ds_dynatrain.engine.members.membership import EndWatch
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.support import practice

if TYPE_CHECKING:
    from ds_dynatrain.engine.members.engine_view import EngineView, OutcomeView
    from ds_dynatrain.engine.preparation import Preparation

T = TypeVar("T")


class ElasticMembership:
    """See `membership.Membership`. elastic: this process as a member."""

    takes_sigterm = True

    def __init__(self, elastic: Elastic) -> None:
        self.elastic = elastic
        self._changes = Changes(elastic)

    @property
    def node(self) -> str:
        """As the agent calls it."""
        return self.elastic.member.place.node

    @property
    def is_newcomer(self) -> bool:
        """Whether the job ran already."""
        return self.elastic.is_newcomer

    @property
    def is_torn(self) -> bool:
        """Whether a member is dead, or a collective has failed."""
        return self.elastic.is_torn

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """UnsupportedError for a model that is cut already, and for lean switches."""
        refuse_cut(model)
        if settings.safety == "lean":
            raise practice("lean switches where members come and go").error()

    def fate(self) -> Fate | None:
        """One that makes WorldChanged of a lost peer."""
        return Fate()

    @contextmanager
    def building(self, generation: int, engine: int) -> Iterator[None]:
        """A failure after that generation aborts it."""
        with self.elastic.building(generation, engine):
            yield
        self.elastic.settle(engine)

    def building_more(self, engine: int) -> AbstractContextManager[None]:
        """A failure aborts it."""
        return self.elastic.building_more(engine)

    def stop_if_over(self, generation: int) -> None:
        """By a failure that was published since."""
        self.elastic.stop_if_over(generation)

    def could_not_build(self) -> None:
        """To the others it is lost."""
        self.elastic.member.stop(has_ended=False)

    def add(self, engine: EngineView) -> None:
        """Engines stand in the order in which they were made."""
        self._changes.engines.append(engine)  # type: ignore[arg-type]

    def begin(self, world: World, members: tuple[int, ...]) -> None:
        """All have a number from here on."""
        if self.elastic.world is None:
            roll = Roll().extended(world.members)
            self.elastic.enter(world, roll, roll.ids_of(members))

    def say_end(self, engine: EngineView) -> None:
        """On the notice board, unless this process leaves and the job goes on."""
        if not self.elastic.member.is_leaving:
            post_end(engine.control)

    def remove(self, engine: EngineView) -> None:
        """With the last engine the member goes."""
        self._changes.leave(engine)  # type: ignore[arg-type]
        if all(one is engine for one in engine.turns.engines):
            self.elastic.member.stop(has_ended=not ended_in_error())

    def end_script(self, engine: EngineView) -> None:
        """Nobody waits; what is left of torch and DeepSpeed is not visited: that is 0.8 s of a core, and a node that
        was told to go has little time."""
        gc.freeze()

    def watch(self, board: Control) -> EndWatch:
        """The coordinator sees to the dead."""
        return EndedWatch(board)

    def speak_between(self, engine: EngineView) -> None:
        """The first engine's world."""
        engine.speak()

    # ---- training ----------------------------------------------------------------------------------------------------

    def stand(self, engine: EngineView, place: str, window_is_open: bool) -> None:
        """See `Changes.stand`."""
        self._changes.stand(engine, place, window_is_open)  # type: ignore[arg-type]

    def open_window(self, engine: EngineView) -> None:
        """Remember where it begins, in case that it is void."""
        engine._window.open(stays_void=self.keeps_void(engine))

    def keeps_void(self, engine: EngineView) -> bool:
        """The first engine's batch, in which the world was torn, is not over."""
        return self._changes.keeps_void(engine)  # type: ignore[arg-type]

    def before_micro_batch(self, engine: EngineView) -> None:
        """Form a new world if a collective of the script's own has failed."""
        self._changes.forming.see_failure()

    def surviving(self, engine: EngineView, call: Callable[[], T], again: Callable[[], T]) -> T:
        """The world is formed anew in between."""
        try:
            self._changes.forming.check()
            return call()
        except RuntimeError as error:
            if not self._changes.forming.recover(error):
                raise
        self._changes.forming.close_worlds()
        return again()

    def returned(self, engine: EngineView, output: Any) -> Any:
        """With losses whose `backward` survives a death, too."""
        return guarded(engine._window.remember(output), engine, self)

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineView) -> None:
        """The coordinator may have been started again."""
        self._changes.reopen(engine)  # type: ignore[arg-type]

    def able(self, engine: EngineView) -> tuple[int, ...]:
        """All; of several engines, only those that work: the engines share their members."""
        return engine.members if engine.turns.is_shared else engine.candidates.members

    def guard(self, preparation: Preparation) -> None:
        """It must not wait for the dead."""
        self._changes.guard(preparation)

    def ended(self, engine: EngineView, proposal: Proposal, outcome: OutcomeView) -> None:
        """It may have been one of a change of members."""
        self._changes.after(engine, proposal, outcome)  # type: ignore[arg-type]

    def retrain(self, members: tuple[int, ...]) -> None:
        """Their deaths tear the world."""
        self._changes.retrain(members)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """On a newcomer, whose state comes in the switch."""
        return tuple(self.elastic.loaded.get(engine) or (None, {})) if self.is_newcomer else None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """What JSON has a word for."""
        self.elastic.loaded[engine] = [plain_part(part) for part in result]

    def saved_with(self, engine: EngineView) -> Sequence[Any]:
        """All others: they have one history."""
        return [other for other in engine.turns.engines if other is not engine]
