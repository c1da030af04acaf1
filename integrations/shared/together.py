"""Collectives of a framework's loops, adapted to ranks that come late and to worlds that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def together(engine: Any, name: str, call: Callable[[], T], alone: T) -> T:
    """Run a collective of the working ranks.

    Returns `alone` on an idle process, if the other ranks have moved on, and if the world is lost during the call.

    engine: the ds_dynatrain engine; None before it is made, when the collective is run as it is.
    name: a name for the log, the same on all ranks.
    """
    if engine is None:
        return call()
    return alone if engine.idle else engine._parts.together(name, call, lambda: alone)
