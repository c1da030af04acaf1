"""Several engines in one process: each has its turn while one of its calls runs, and nobody has it in between.

`torch.distributed`, DeepSpeed's modules, the random generators and the environment variables are there once for a
process, and an engine has its own of each: its world, and the streams of its places in it. One engine alone keeps the
process to itself. Of several, each puts its own in place when it is called, and takes it along when it returns; in
between torch.distributed speaks of the processes of the launch, or, where members come and go, of the first engine's
world, and the generators are the script's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.process_groups import found_on_sign, put_up, unregister
from ds_dynatrain.adapters.process_wide import ProcessWide, put_plain
from ds_dynatrain.engine.course import Course
from ds_dynatrain.engine.streams import Held
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout
from ds_dynatrain.support import practice

if TYPE_CHECKING:
    from ds_dynatrain.engine.core import EngineCore


@dataclass(frozen=True)
class Own:
    """What an engine has put aside, apart from its world, while others have the process."""

    streams: Held
    wide: ProcessWide

    @staticmethod
    def now() -> Own:
        """As it is at present."""
        return Own(Held.now(), ProcessWide.capture())

    def put(self) -> None:
        """Make it so."""
        self.streams.put()
        self.wide.put()


class Turns:
    """The engines of this process, in the order in which they were made, and whose turn it is."""

    def __init__(self) -> None:
        self._engines: list[weakref.ref[EngineCore]] = []
        self.course = Course(self)
        self._now: EngineCore | None = None
        self._sign: td.ProcessGroup | None = None
        self._backward: AbstractContextManager[None] | None = None
        self._is_joining = False

    @staticmethod
    def of_process() -> Turns:
        """Those of the engines that are open; new ones if there is none."""
        found = found_on_sign() if td.is_initialized() else None
        return found if isinstance(found, Turns) else Turns()

    @property
    def engines(self) -> list[EngineCore]:
        """Those that are open."""
        return [engine for engine in (reference() for reference in self._engines) if engine is not None]

    @property
    def is_shared(self) -> bool:
        """Whether the process has several engines."""
        return len(self._engines) > 1

    # ---- engines come and go -----------------------------------------------------------------------------------------

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Around the building of an engine, which finds the process as the launch has made it.

        UnsupportedError, ConfigError: the others leave no room for one. They are the same on every process.
        """
        for engine in self.engines:
            refuse_idle(engine.layout, len(engine.candidates))
            if engine.is_switching:
                raise ConfigError(
                    "initialize: a switch of another engine of this process is pending; make all engines first, or "
                    "wait until it has happened"
                )
        if len(self.engines) == 1:
            self.engines[0].own = Own.now()
            put_plain()
        if self.engines:
            self.engines[0].launch.install()
        self._is_joining = True
        try:
            yield
        finally:
            self._is_joining = False
            self._settle()
            if self.is_shared:
                self._speak_between()

    def add(self, engine: EngineCore) -> None:
        """One more is open."""
        if self._sign is None:
            self._sign = put_up(self)
        self._engines.append(weakref.ref(engine))

    def leave(self, engine: EngineCore) -> None:
        """It has ended. One that is left alone has the process to itself."""
        kept = [(reference, reference()) for reference in self._engines]
        self._engines = [reference for reference, held in kept if held is not None and held is not engine]
        if not self._engines and self._sign is not None:
            unregister(self._sign)
            self._sign = None
        self._settle()
        if self.is_shared and self._now is None:
            self._speak_between()

    def _settle(self) -> None:
        """Not in the middle of anything: an engine that was dropped ends when it is collected, wherever that is."""
        if self._is_joining or self._now is not None:
            return
        engines = self.engines
        if len(engines) == 1 and engines[0].own is not None:
            own, engines[0].own = engines[0].own, None
            engines[0].speak()
            own.put()
        for engine in engines:
            if self.is_shared and engine.own is None:
                engine.own = Own.now()
                put_plain()
                self._speak_between()

    def _speak_between(self) -> None:
        """Nobody has the process."""
        first = self.engines[0]
        first.membership.speak_between(first)

    # ---- and take turns ----------------------------------------------------------------------------------------------

    @contextmanager
    def of(self, engine: EngineCore) -> Iterator[None]:
        """Around a call of an engine."""
        self._end_broken_backward()
        if not self.is_shared or self._now is engine or engine.own is None:
            yield
            return
        before, outside = self._now, Own.now()
        self._now = engine
        engine.speak()
        engine.own.put()
        try:
            yield
        finally:
            engine.own, self._now = Own.now(), before
            if before is None:
                self._speak_between()
            else:
                before.speak()
            outside.put()
            self._settle()

    @contextmanager
    def backward(self, engine: EngineCore) -> Iterator[None]:
        """Around what begins a backward pass; it is the engine's turn until the pass ends, whoever has called it.

        UnsupportedError for one that goes through another engine as well: what DeepSpeed does for a parameter's
        gradient depends on whose turn it is, and autograd takes them in an order of its own.
        """
        if not self.is_shared or self._now is engine:
            yield
            return
        if self._now is not None:
            raise practice("one backward pass through two engines").error()
        turn = self.of(engine)
        turn.__enter__()
        try:
            yield
        except BaseException:
            turn.__exit__(None, None, None)
            raise
        self._backward = turn
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # after those of DeepSpeed

    def _end_backward(self) -> None:
        turn, self._backward = self._backward, None
        if turn is not None:
            turn.__exit__(None, None, None)

    def _end_broken_backward(self) -> None:
        """A pass that an error has ended calls nobody back."""
        if self._backward is not None and torch._C._current_graph_task_id() == -1:
            self._end_backward()


def refuse_idle(layout: Layout, processes: int) -> None:
    """UnsupportedError for a layout of one of several engines that leaves processes without work."""
    if layout.world_size < processes:
        raise practice("idle processes beside another engine").error(_idle_in(layout, processes))


def refuse_idle_target(turns: Turns, layout: Layout, processes: int) -> None:
    """SwitchRefused in place of `refuse_idle`, where there are several engines."""
    if turns.is_shared and layout.world_size < processes:
        raise practice("idle processes beside another engine").refused(_idle_in(layout, processes))


def _idle_in(layout: Layout, processes: int) -> str:
    idle = processes - layout.world_size
    return f"{layout} of one of several engines in a process, which leaves {idle} of {processes} processes idle"


def in_turn(*names: str) -> Callable[[type], type]:
    """Decorates an engine class: its calls of these names are made in the engine's turn."""

    def decorate(kind: type) -> type:
        for name in names:
            setattr(kind, name, _taking_turn(kind, name))
        return kind

    return decorate


def _taking_turn(kind: type, name: str) -> Callable[..., Any]:
    own = vars(kind).get(name)

    @wraps(getattr(kind, name))
    def in_its_turn(engine: EngineCore, *arguments: Any, **named: Any) -> Any:
        call = getattr(super(kind, engine), name) if own is None else partial(own, engine)
        with engine.turns.of(engine):
            return call(*arguments, **named)

    return in_its_turn
