"""Collectives that Accelerate's loops call, adapted to ranks that arrive late and worlds that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ds_dynatrain.integrations.shared.together import together

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object

T = TypeVar("T")


class Collectives(Below):
    """Mix-in over `accelerate.Accelerator` whose collectives cover the working ranks.

    If a process comes late and the others have moved on, or if the world is lost during the call, the result is this
    process's own part.
    """

    engine: Any
    """The ds_dynatrain engine; None before it is made."""

    def _together(self, name: str, call: Callable[[], T], alone: T) -> T:
        """Run a collective of the working ranks; see the function of this name."""
        return together(self.engine, name, call, alone)

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor the way Accelerate does. Returns this process's own tensor if the world is lost meanwhile."""
        return self._together("a gather", lambda: super(Collectives, self).gather(tensor), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather for metrics the way Accelerate does.

        Returns this process's own data if the world is lost meanwhile.
        """
        gather = super().gather_for_metrics
        return self._together("a gather for metrics", lambda: gather(input_data, use_gather_object), input_data)

    def reduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """Reduce a tensor the way Accelerate does. Returns this process's own tensor if the world is lost meanwhile."""
        return self._together("a reduce", lambda: super(Collectives, self).reduce(tensor, *arguments, **named), tensor)

    def pad_across_processes(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """Pad a tensor the way Accelerate does.

        Returns this process's own tensor, unpadded, if the world is lost meanwhile.
        """
        pad = super().pad_across_processes
        return self._together("a pad across processes", lambda: pad(tensor, *arguments, **named), tensor)

    def wait_for_everyone(self) -> None:
        """Wait for the working processes, the way Accelerate does."""
        self._together("a wait for everyone", super().wait_for_everyone, None)
