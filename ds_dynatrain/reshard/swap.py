"""Detaching an engine's optimizer from one set of buffers and attaching it to another, in a way that can be undone.

Each step registers its undo function before it starts, so that a step that fails halfway is undone as well.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import install
from ds_dynatrain.adapters.model.shaper import Made
from ds_dynatrain.adapters.zero.state import Buffers, Scalars
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.carry import LoadReason, rest_carry, shared_carry, take
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import Layout, VirtualParameterSpace


@dataclass(frozen=True)
class Before:
    """State of a working engine before a change, to which it returns if the change fails.

    shared: the extra state that is equal on all members.
    rest: the other extra state, if the change replaces it; else None.
    """

    world: World
    layout: Layout
    config: tuple[dict[str, Any], Any]
    buffers: Buffers
    scalars: Scalars
    shared: dict[str, Any]
    rest: dict[str, Any] | None = None

    @staticmethod
    def of(engine: EngineCore, has_rest: bool = False) -> Before:
        """Capture the current state of an engine, which must be between two global batches."""
        if engine.world is None:
            raise RuntimeError("an idle member holds no state that could change")
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        shared = shared_carry(engine, scalars)
        rest = copy.deepcopy(rest_carry(engine)) if has_rest else None
        return Before(engine.world, engine.layout, engine.host.present_config, buffers, scalars, shared, rest)


class Swap:
    """A change of an engine's memory, by the methods `off`, `into` and `over`, in this order.

    A member without state before or after the change leaves some of these calls out. `undo` also restores the random
    streams as they were when this object was made.

    on_undo: registers a function and its arguments for `undo`.
    undo: calls the registered functions, the last one first.
    keep: makes the change permanent, by dropping all registered functions.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.has_begun, self._engine, steps = False, engine, ExitStack()
        self.on_undo, self.undo, self.keep = steps.callback, steps.close, steps.pop_all
        self.streams = streams.capture()
        self.on_undo(streams.restore, self.streams)

    def off(self, before: Before) -> None:
        """Detach the optimizer, unless it is detached already."""
        if not self.has_begun:
            self.has_begun = True
            self.on_undo(self._back, before)
            self._engine.host.detach()

    def into(self, world: World) -> None:
        """Enter a world. For a member that had no world, `undo` returns it to the group that it uses while idle."""
        if not self.has_begun:
            self.has_begun = True
            self.on_undo(self._leave)
        install(world)

    def over(
        self,
        vps: VirtualParameterSpace,
        layout: Layout,
        world: World,
        rank: int,
        buffers: Buffers,
        scalars: Scalars,
        made: Made | None = None,
    ) -> None:
        """Give the module the shape that it has on a rank, and attach the optimizer to `buffers`.

        made: children for the module that were built ahead of time; None to build them now.
        """
        engine = self._engine
        replaced = engine.host.reshape(layout, rank, vps.local(layout, rank).tensors, made)
        if replaced is not None:
            self.on_undo(engine.host.undo_reshape, replaced)
        self.on_undo(engine.host.detach)
        engine.host.attach(layout, world, engine.config_for(layout), buffers, scalars)

    def _back(self, before: Before) -> None:
        """Attach the old optimizer to the old buffers, in the old world."""
        engine = self._engine
        install(before.world)
        engine.host.attach(before.layout, before.world, before.config, before.buffers, before.scalars)
        if before.rest is None:
            take(engine, before.shared, LoadReason.FAILED_SWITCH)
        else:
            take(engine, {**before.shared, **before.rest, "casts": True}, LoadReason.START)

    def _leave(self) -> None:
        self._engine.host.leave_world()
        self._engine.launch.install()
