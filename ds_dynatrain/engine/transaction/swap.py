"""An engine's optimizer comes off one memory and goes over another, and everything back if that is not to stay.

Each step leaves what undoes it on a stack before it is taken, so that a step that fails in the middle is undone, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ds_dynatrain.adapters.shaper import Made
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.adapters.world import World
from ds_dynatrain.adapters.worlds import install
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.space import Layout, VirtualParameterSpace


class Swap:
    """In this order: `off`, `into`, `over`; whoever holds nothing or will hold nothing leaves steps out."""

    def __init__(self, engine: EngineCore) -> None:
        self.has_begun = False
        self._engine, self._undo = engine, ExitStack()

    def on_undo(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have `call` called by `undo`, before all that was done until now is undone."""
        self._undo.callback(call, *arguments)

    def off(self, back: Callable[[], None]) -> None:
        """The optimizer comes off. back: puts it over its memory again, in its world."""
        self.has_begun = True
        self.on_undo(back)
        self._engine.host.detach()

    def into(self, world: World) -> None:
        """Stand in a world; who came from none goes back to the group that it idles in."""
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
        """The module takes the shape of a rank, and the optimizer goes over `buffers`. made: the module's children."""
        engine = self._engine
        replaced = engine.take_shape(vps, layout, rank, made)
        if replaced is not None:
            self.on_undo(engine.host.undo_reshape, replaced)
        self.on_undo(engine.host.detach)
        engine.host.attach(layout, world, engine.config_for(layout), buffers, scalars)

    def undo(self) -> None:
        """Everything back, the last step first."""
        self._undo.close()

    def keep(self) -> None:
        """It stays: what would undo it is let go."""
        self._undo.pop_all()

    def _leave(self) -> None:
        self._engine.host.leave_world()
        self._engine.launch.install()
