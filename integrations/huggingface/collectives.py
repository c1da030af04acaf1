"""Collectives that loops of Accelerate's call, where ranks come late and worlds are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object

T = TypeVar("T")


class Collectives(Below):
    """Over `accelerate.Accelerator`: its collectives, of the ranks that work.

    Where a process comes late and the others are elsewhere, or the world is lost in the call, it is about what this
    process alone has.
    """

    engine: Any
    """Of ds_dynatrain; None before there is one."""

    def _together(self, name: str, call: Callable[[], T], alone: T) -> T:
        """A collective of the ranks that work; `alone` where they are elsewhere, or the world is lost in it."""
        engine = self.engine
        if engine is None:
            return call()
        return alone if engine.idle else engine._parts.loaders.together(name, call, lambda: alone)

    def gather(self, tensor: Any) -> Any:
        """Accelerate's; in a world that is lost in it, what this process has."""
        return self._together("a gather", lambda: super(Collectives, self).gather(tensor), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same."""
        gather = super().gather_for_metrics
        return self._together("a gather for metrics", lambda: gather(input_data, use_gather_object), input_data)

    def reduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """The same."""
        return self._together("a reduce", lambda: super(Collectives, self).reduce(tensor, *arguments, **named), tensor)

    def pad_across_processes(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """The same."""
        pad = super().pad_across_processes
        return self._together("a pad across processes", lambda: pad(tensor, *arguments, **named), tensor)

    def wait_for_everyone(self) -> None:
        """Accelerate's, of the processes that work."""
        self._together("a wait for everyone", super().wait_for_everyone, None)
