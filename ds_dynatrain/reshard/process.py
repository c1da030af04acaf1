"""State that exists once in a process: its engines and whose turn it is, its membership, and what came before an
engine.

`torch.distributed`, DeepSpeed's modules, the random generators and the environment variables exist once in a process,
while each engine has its own world and its own streams. A single engine keeps the process to itself. Of several, each
puts its own in place when it is called, and takes it along when it returns. In between, torch.distributed speaks of the
processes of the launch, or, if members come and go, of the first engine's world; and the generators are the script's.

`PROCESS` is the only module-level state of this package.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.deepspeed.plain_engines import PlainEngine, plain_engines
from ds_dynatrain.adapters.groups.process_groups import is_known
from ds_dynatrain.adapters.zero.process_wide import put_plain
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.reshard.core import EngineCore, PutAsideState
from ds_dynatrain.reshard.membership import Membership
from ds_dynatrain.reshard.sync_points import SyncPoints
from ds_dynatrain.space import Layout
from ds_dynatrain.support import usage


class Process:
    """State of a process; its one instance is `PROCESS`.

    It has the open engines, in the order in which they were made, and whose turn it is; the `sync_points` of the
    script; the `membership`; and what `init_distributed` has left for `initialize` (`early`, a `members.entry.Early`,
    whose file imports this one).
    """

    def __init__(self) -> None:
        self.early: Any = None
        self._membership: Membership | None = None
        self._is_joining = False
        self._forget()

    def _forget(self) -> None:
        """Reset to the state without an open engine."""
        self._engines: list[weakref.ref[EngineCore]] = []
        self.sync_points = SyncPoints(lambda: next(iter(self.engines), None), lambda: self.membership)
        self._now: EngineCore | None = None
        self._backward: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        """Begin `initialize`: drop engines whose process groups the script has taken down."""
        for engine in self.engines:
            if not is_known(engine.launch.group):
                engine.own = None
                self._engines = [reference for reference in self._engines if reference() is not engine]
        if not self.engines:
            self._forget()

    def found_early(self) -> Any:
        """Return what `init_distributed` has left for `initialize`; None if the script has taken its group down."""
        group = td.group.WORLD if td.is_initialized() else None
        return self.early if self.early is not None and self.early.launch.group is group else None

    @property
    def membership(self) -> Membership:
        """Membership that all engines share; set as soon as the first one is being made."""
        if self._membership is None:
            raise RuntimeError("this process has come into no job yet: call initialize")
        return self._membership

    @membership.setter
    def membership(self, membership: Membership) -> None:
        self._membership = membership

    @property
    def engines(self) -> list[EngineCore]:
        """Open engines, in the order in which they were made."""
        return [engine for engine in (reference() for reference in self._engines) if engine is not None]

    @property
    def is_joining(self) -> bool:
        """Whether an engine is being made: the process is its own then, also while another one ends."""
        return self._is_joining

    @property
    def is_shared(self) -> bool:
        """Whether the process has several engines."""
        return len(self._engines) > 1

    # ---- engines come and go -----------------------------------------------------------------------------------------

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Return a block for building an engine, which finds the process as the launch has made it.

        Raises UnsupportedError or ConfigError, the same on every process, if the open engines leave no room for another
        one.
        """
        for engine in self.engines:
            refuse_idle(engine.layout, len(engine.candidates))
            if engine.is_switching:
                raise ConfigError(
                    "initialize: a switch of another engine of this process is pending; make all engines first, or "
                    "wait until it has happened"
                )
        if len(self.engines) == 1:
            self.engines[0].own = PutAsideState.now()
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
                self._activate_between()

    def add(self, engine: EngineCore) -> None:
        """Add an engine that is open now."""
        self._engines.append(weakref.ref(engine))

    def leave(self, engine: EngineCore) -> None:
        """Remove an engine that has ended. If one is left, it has the process to itself."""
        kept = [(reference, reference()) for reference in self._engines]
        self._engines = [reference for reference, held in kept if held is not None and held is not engine]
        if not self._engines:
            self._forget()
        self._settle()
        if self.is_shared and self._now is None and not self._is_joining:
            self._activate_between()

    def _settle(self) -> None:
        """Give the process to the only engine, or put the state of several aside.

        Does nothing in the middle of a call: a dropped engine ends when it is collected, wherever that is.
        """
        if self._is_joining or self._now is not None:
            return
        engines = self.engines
        if len(engines) == 1 and engines[0].own is not None:
            own, engines[0].own = engines[0].own, None
            engines[0].activate()
            own.put()
        for engine in engines:
            if self.is_shared and engine.own is None:
                engine.own = PutAsideState.now()
                put_plain()
                self._activate_between()

    def _activate_between(self) -> None:
        """Put in place what holds while no engine has the turn."""
        self.membership.activate_between(self.engines[0])

    # ---- and take turns ----------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, engine: EngineCore) -> Iterator[None]:
        """Return a block for a call of an engine, in which process-wide state is the engine's."""
        self._end_broken_backward()
        if not self.is_shared or self._is_joining or self._now is engine or engine.own is None:
            yield
            return
        before, outside = self._now, PutAsideState.now()
        self._now = engine
        engine.activate()
        engine.own.put()
        try:
            yield
        finally:
            engine.own, self._now = PutAsideState.now(), before
            if before is None:
                self._activate_between()
            else:
                before.activate()
            outside.put()
            self._settle()

    @contextmanager
    def backward(self, engine: EngineCore) -> Iterator[None]:
        """Return a block for what begins a backward pass; the engine's turn lasts until the pass ends.

        Raises UnsupportedError for a pass that goes through another engine as well: what DeepSpeed does for a
        parameter's gradient depends on whose turn it is, and autograd takes the parameters in an order of its own.
        """
        if not self.is_shared or self._now is engine:
            yield
            return
        if self._now is not None:
            raise usage("one backward pass through two engines").error()
        turn = self.turn(engine)
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
        """End the turn of a backward pass that an error has ended, since such a pass calls no callback."""
        if self._backward is not None and torch._C._current_graph_task_id() == -1:
            self._end_backward()


PROCESS = Process()


def refuse_idle(layout: Layout, processes: int) -> None:
    """Raise UnsupportedError if a layout leaves processes idle; called for each of several engines of a process."""
    if layout.world_size < processes:
        raise usage("idle processes beside another engine").error(_idle_in(layout, processes))


def refuse_module_of_another(model: nn.Module, layout: Layout) -> None:
    """Raise UnsupportedError for a model that an open engine holds in ZeRO-3, where this layout has another stage."""
    mine = {id(parameter) for parameter in model.parameters()}
    for engine in PROCESS.engines:
        is_shared = any(id(parameter) in mine for parameter in engine.host.module.parameters())
        if is_shared and engine.layout.zero_stage == 3 and layout.zero_stage != 3:
            have = f"initialize in {layout} with parameters of engine {engine.job.number}, in {engine.layout}"
            raise usage("a model of another engine in ZeRO-3").error(have)


def refuse_beside_plain(layout: Layout, processes: int) -> None:
    """Raise UnsupportedError for a first layout that leaves processes idle that a plain DeepSpeed engine needs."""
    if layout.world_size < processes:
        for plain in plain_engines():
            raise usage("a plain engine beside idle processes").error(_without_plain(plain, layout))


def refuse_target_beside_plain(layout: Layout, present: Layout) -> None:
    """Raise SwitchRefused for a target without processes, or groups, that a plain DeepSpeed engine needs."""
    if layout.world_size == present.world_size:
        return
    for plain in plain_engines():
        if plain.follows_world or layout.world_size < plain.processes:
            raise usage("a plain engine beside idle processes").refused(_without_plain(plain, layout))


def _without_plain(plain: PlainEngine, layout: Layout) -> str:
    return (
        f"{layout}, of {layout.world_size} processes, beside an engine of deepspeed.initialize in ZeRO stage "
        f"{plain.stage} over {plain.processes}"
    )


def refuse_idle_target(layout: Layout, processes: int) -> None:
    """Raise SwitchRefused for a target of one of several engines that leaves processes without work."""
    if PROCESS.is_shared and layout.world_size < processes:
        raise usage("idle processes beside another engine").refused(_idle_in(layout, processes))


def _idle_in(layout: Layout, processes: int) -> str:
    idle = processes - layout.world_size
    return f"{layout} of one of several engines in a process, which leaves {idle} of {processes} processes idle"
