"""A collective that was begun, in front of another one that answers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Work

WAITS = ("wait", "synchronize", "result")
QUESTIONS = ("exception", "get_future", "is_completed", "is_success", "source_rank")


class ForwardedWork(Work):
    """Its answers are those of `work`, which it keeps."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work


def _asked(name: str) -> Callable[..., Any]:
    def call(self: ForwardedWork, *arguments: Any, **named: Any) -> Any:
        return getattr(self._work, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name in (*WAITS, *QUESTIONS):
    setattr(ForwardedWork, _name, _asked(_name))
