"""A key-value store in front of another one, which may change.

A group keeps the store that it was made over as long as it lives. One that goes on from world to world would keep the
connection of the first, in this process and in the coordinator's; it goes over to the next world's store instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

ANSWERED = (
    *("set", "get", "add", "check", "wait", "append", "compare_set", "delete_key", "num_keys", "multi_get"),
    *("multi_set", "has_extended_api", "set_timeout", "clone"),
)
"""What the other one is asked, also by torch's own code."""


class ForwardedStore(Store):
    """Its answers are those of `store`."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def go_over(self, store: Store) -> None:
        """Ask another one from here on, with other keys: what was written does not come along."""
        self._store = store


def _asked(name: str) -> Callable[..., Any]:
    def call(self: ForwardedStore, *arguments: Any, **named: Any) -> Any:
        return getattr(self._store, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name in ANSWERED:
    setattr(ForwardedStore, _name, _asked(_name))
