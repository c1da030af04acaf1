"""Taking an engine's optimizer off one memory and putting it over another, with a way back.

Each step leaves what undoes it on a stack before it is taken, so that a step that fails in the middle is undone, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    """State of a working engine before a change, to which it goes back if the change fails.

    rest: of the carry, if the change takes over another one.
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
        """Note the present state; the engine must stand between two global batches."""
        if engine.world is None:
            raise RuntimeError("an idle member holds no state that could change")
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        shared = shared_carry(engine, scalars)
        rest = copy.deepcopy(rest_carry(engine)) if has_rest else None
        return Before(engine.world, engine.layout, engine.host.present_config, buffers, scalars, shared, rest)


class Swap:
    """A change of an engine's memory, in this order: `off`, `into`, `over`.

    A member that holds nothing, or will hold nothing, leaves steps out. `undo` puts random streams back to where they
    were when this was made.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.has_begun = False
        self._engine, self._undo = engine, ExitStack()
        self.streams = streams.capture()
        self.on_undo(streams.restore, self.streams)

    def on_undo(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have `undo` call `call`, before it undoes everything that was done until now."""
        self._undo.callback(call, *arguments)

    def off(self, before: Before) -> None:
        """Take the optimizer off, unless it is off."""
        if not self.has_begun:
            self.has_begun = True
            self.on_undo(self._back, before)
            self._engine.host.detach()

    def into(self, world: World) -> None:
        """Enter a world; `undo` takes a member that came from none back to the group that it idles in."""
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
        """Give the module the shape of a rank, and put the optimizer over `buffers`. made: the module's children."""
        engine = self._engine
        replaced = engine.take_shape(vps, layout, rank, made)
        if replaced is not None:
            self.on_undo(engine.host.undo_reshape, replaced)
        self.on_undo(engine.host.detach)
        engine.host.attach(layout, world, engine.config_for(layout), buffers, scalars)

    def undo(self) -> None:
        """Undo everything, the last step first."""
        self._undo.close()

    def keep(self) -> None:
        """Keep the change: drop everything that would undo it."""
        self._undo.pop_all()

    def _back(self, before: Before) -> None:
        """Put the old optimizer over the old memory, in the old world."""
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
