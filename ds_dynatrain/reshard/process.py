"""State that exists once in a process: its open engines, which of them is being called, and its membership.

An engine *has the turn* while a call of it runs. `torch.distributed`, DeepSpeed's modules, the random generators and
the environment variables exist once in a process, but each engine has its own world and its own random streams. A
single engine has the process to itself. If there are several, each installs its own state when it is called, and saves
it when the call returns. Between calls, the generators belong to the script, and `torch.distributed` refers to the
processes of the launch (or, in an elastic job, to the first engine's world).

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
    """State of a process. There is one instance, `PROCESS`.

    engines: the open engines, in the order in which they were made.
    sync_points: the points between steps at which members' scripts meet.
    membership: the membership that all engines share.
    is_joining: whether an engine is being created, which then has the process to itself.
    early: the `engine.entry.Early` that `init_distributed` has made for `initialize`, or None. (It is not annotated,
        because its file imports this one.)
    """

    def __init__(self) -> None:
        self.early: Any = None
        self._membership: Membership | None = None
        self.is_joining = False
        self._forget()

    def _forget(self) -> None:
        """Reset this object to the state of a process without an open engine."""
        self._engines: list[weakref.ref[EngineCore]] = []
        self.sync_points = SyncPoints(lambda: next(iter(self.engines), None), lambda: self.membership)
        self._now: EngineCore | None = None
        self._backward: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        """Forget engines whose process groups the script has destroyed. Called at the beginning of `initialize`."""
        for engine in self.engines:
            if not is_known(engine.launch.group):
                engine.own = None
                self._engines = [reference for reference in self._engines if reference() is not engine]
        if not self.engines:
            self._forget()

    def found_early(self) -> Any:
        """Return the object that `init_distributed` has made for `initialize`; None if there is none or its process
        group was destroyed."""
        group = td.group.WORLD if td.is_initialized() else None
        return self.early if self.early is not None and self.early.launch.group is group else None

    @property
    def membership(self) -> Membership:
        """The membership that all engines share. Raises RuntimeError before the first engine is created."""
        if self._membership is None:
            raise RuntimeError("this process has come into no job yet: call initialize")
        return self._membership

    @membership.setter
    def membership(self, membership: Membership) -> None:
        self._membership = membership

    @property
    def engines(self) -> list[EngineCore]:
        """The open engines, in the order in which they were made."""
        return [engine for engine in (reference() for reference in self._engines) if engine is not None]

    @property
    def is_shared(self) -> bool:
        """Whether the process has several open engines."""
        return len(self._engines) > 1

    # ---- engines come and go -----------------------------------------------------------------------------------------

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Context manager for creating an engine. Within its block, process-wide state is as the launcher left it.

        Raises UnsupportedError or ConfigError, the same on every process, if the open engines do not permit another
        one.
        """
        for engine in self.engines:
            refuse_idle(engine.layout, len(engine.candidates.nodes))
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
        self.is_joining = True
        try:
            yield
        finally:
            self.is_joining = False
            self._settle()
            if self.is_shared:
                self._activate_between()

    def add(self, engine: EngineCore) -> None:
        """Add an engine that has just been opened."""
        self._engines.append(weakref.ref(engine))

    def leave(self, engine: EngineCore) -> None:
        """Remove an engine that has ended. If only one engine remains, it gets the process to itself."""
        kept = [(reference, reference()) for reference in self._engines]
        self._engines = [reference for reference, held in kept if held is not None and held is not engine]
        if not self._engines:
            self._forget()
        self._settle()
        if self.is_shared and self._now is None and not self.is_joining:
            self._activate_between()

    def _settle(self) -> None:
        """If there is only one engine, install its state in the process; if there are several, save the state of each.

        Does nothing in the middle of a call, because an engine may end whenever the garbage collector runs.
        """
        if self.is_joining or self._now is not None:
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
        """Install the process-wide state that applies between calls of engines."""
        self.membership.activate_between(self.engines[0])

    # ---- and take turns ----------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, engine: EngineCore) -> Iterator[None]:
        """Context manager for a call of an engine. Within its block, process-wide state belongs to that engine."""
        self._end_broken_backward()
        if not self.is_shared or self.is_joining or self._now is engine or engine.own is None:
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
        """Context manager for the start of a backward pass. Process-wide state belongs to the engine until the pass
        ends.

        Raises UnsupportedError if the pass also goes through a second engine: how DeepSpeed handles a parameter's
        gradient depends on which engine is being called, and autograd visits parameters in an order of its own.
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
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # after DeepSpeed's callbacks

    def _end_backward(self) -> None:
        turn, self._backward = self._backward, None
        if turn is not None:
            turn.__exit__(None, None, None)

    def _end_broken_backward(self) -> None:
        """Release the process-wide state after a backward pass that raised an error, because its callback is never
        called."""
        if self._backward is not None and torch._C._current_graph_task_id() == -1:
            self._end_backward()


PROCESS = Process()


def refuse_idle(layout: Layout, processes: int) -> None:
    """Raise UnsupportedError if a layout leaves processes idle. Called only if the process has several engines."""
    if layout.world_size < processes:
        raise usage("idle processes beside another engine").error(_idle_in(layout, processes))


def refuse_module_of_another(model: nn.Module, layout: Layout) -> None:
    """Raise UnsupportedError if another engine holds this model in ZeRO-3 and the layout has another ZeRO stage."""
    mine = {id(parameter) for parameter in model.parameters()}
    for engine in PROCESS.engines:
        is_shared = any(id(parameter) in mine for parameter in engine.host.module.parameters())
        if is_shared and engine.layout.zero_stage == 3 and layout.zero_stage != 3:
            have = f"initialize in {layout} with parameters of engine {engine.job.number}, in {engine.layout}"
            raise usage("a model of another engine in ZeRO-3").error(have)


def refuse_beside_plain(layout: Layout, processes: int) -> None:
    """Raise UnsupportedError if an engine's first layout leaves processes idle that a plain DeepSpeed engine needs."""
    if layout.world_size < processes:
        for plain in plain_engines():
            raise usage("a plain engine beside idle processes").error(_without_plain(plain, layout))


def refuse_target(layout: Layout, present: Layout, processes: int) -> None:
    """Raise SwitchRefused if a switch would take processes or groups away from another engine, or from a plain
    DeepSpeed engine."""
    if PROCESS.is_shared and layout.world_size < processes:
        raise usage("idle processes beside another engine").refused(_idle_in(layout, processes))
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


def _idle_in(layout: Layout, processes: int) -> str:
    idle = processes - layout.world_size
    return f"{layout} of one of several engines in a process, which leaves {idle} of {processes} processes idle"
