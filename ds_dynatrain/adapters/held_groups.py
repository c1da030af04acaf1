"""The groups that a world holds, by kind. One that stays is held by two worlds while the second follows the first.

It is the same group then, over the same connections; only the ranks of its members may be others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as td
from torch._C._distributed_c10d import Store

from ds_dynatrain.adapters.forwarded_store import ForwardedStore
from ds_dynatrain.adapters.process_groups import register
from ds_dynatrain.adapters.watched import GroupStatus, WatchedGroup


@dataclass(eq=False)
class HeldGroup:
    """A group, and the store that it was made over. users: how many worlds hold it, two while it is handed on.

    over: what that store is in front of, if it goes along to the next world's.
    """

    group: td.ProcessGroup
    store: Store
    users: int = 0
    over: ForwardedStore | None = None


class HeldGroups:
    """Those of one world; a group may serve several kinds."""

    def __init__(self) -> None:
        self._held: dict[str, HeldGroup] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def __contains__(self, kind: str) -> bool:
        return kind in self._held

    def __getitem__(self, kind: str) -> HeldGroup:
        return self._held[kind]

    @property
    def kinds(self) -> list[str]:
        """In the order in which they were held."""
        return list(self._held)

    def ranks(self, kind: str) -> tuple[int, ...]:
        """The ranks of the world that are in the group of a kind, in its order."""
        return self._ranks[kind]

    def hold(self, kind: str, ranks: tuple[int, ...], held: HeldGroup) -> None:
        """Use a group for a kind."""
        held.users += held not in self._held.values()
        self._held[kind], self._ranks[kind] = held, ranks

    def let_go(self, kinds: Iterable[str]) -> list[td.ProcessGroup]:
        """The groups of these kinds that no world holds any more; all other references to them are gone."""
        gone = {kind: self._held.pop(kind) for kind in kinds if kind in self._held}
        for kind in gone:
            del self._ranks[kind]
        ended = {id(held): held for held in gone.values() if held not in self._held.values()}
        for held in ended.values():
            held.users -= 1
        return [held.group for held in ended.values() if held.users == 0]

    @property
    def watched(self) -> list[tuple[str, WatchedGroup, tuple[int, ...]]]:
        """Each that tells what was begun and ended in it: a kind that it serves, the group, its ranks."""
        found: dict[int, tuple[str, WatchedGroup, tuple[int, ...]]] = {}
        for kind, ranks in list(self._ranks.items()):
            held = self._held.get(kind)
            if held is not None and isinstance(held.group, WatchedGroup):
                found.setdefault(id(held), (kind, held.group, ranks))
        return list(found.values())

    def register(self, status: GroupStatus | None) -> None:
        """Make all but the one for the moves known to `torch.distributed`, with the ranks that they have here.

        status: of the world that holds them, which they serve from here on.
        """
        for kind, held in self._held.items():
            if kind != "transfer":
                register(held.group, held.store, self._ranks[kind])
            if status is not None and isinstance(held.group, WatchedGroup):
                held.group.serve(status)
