"""The group that processes belong to before a world of ours exists, and while they are idle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as td
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters import parallel_state
from ds_dynatrain.adapters.device import is_accelerated
from ds_dynatrain.adapters.process_groups import make_fake_group, make_group, tear_down, unregister
from ds_dynatrain.adapters.watched import GroupStatus, ManagedProcessGroup
from ds_dynatrain.adapters.world import HeldGroup, World
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class LaunchWorld:
    """The group that the launcher's processes formed, to which idle members belong. own: the group as a world, if we
    made it.
    """

    group: Any
    member: int
    size: int
    own: World | None = None

    @staticmethod
    def current() -> LaunchWorld:
        """Return the present default group. Called before any world of ours is installed."""
        return LaunchWorld(c10d._get_default_group(), td.get_rank(), td.get_world_size())

    @staticmethod
    def formed(store: Store, name: str, member: int, size: int, seconds: float, status: GroupStatus) -> LaunchWorld:
        """Make a group by `make_group`, watched, and known to `torch.distributed` from here on."""
        if size == 1 and is_accelerated():  # as in a world: one that needs nothing to serve both devices
            group, made_over = make_fake_group(name, 0, 1)
        else:
            gloo, made_over = make_group(store, name, member, size, seconds)
            group = ManagedProcessGroup(gloo, status)
        world = World(0, tuple(range(size)), member, Layout(zero_stage=0, data=size), status=status)
        world.hold("default", world.members, HeldGroup(group, made_over))
        world.register()
        return LaunchWorld(group, member, size, world)

    def connect(self, seconds: float, stop: Callable[[], None]) -> None:
        """Let a group of `formed` serve the accelerator's device, too. All its processes call it, for code that needs
        the device's collectives before a world exists. Does nothing without an accelerator, and in a second call.

        seconds, stop: see `World.connect`, which also lists the errors.
        """
        if self.own is not None and self.own.lacks(None):
            self.own.connect(seconds, stop=stop)
            unregister(self.group)  # torch notes by what a group communicates
            self.own.register()

    def retire(self) -> threading.Thread:
        """Take down a group of `formed` that no process uses any more; all its processes call it. See `drop`."""
        unregister(self.group)
        if self.own is None:
            return tear_down([self.group])
        return tear_down(self.own.give_up(["default"]), self.own.disconnect(False))

    def install(self) -> None:
        """Make `torch.distributed` use the launch group again, on a member that trains in no world."""
        c10d._update_default_pg(self.group)
        parallel_state.forget()
        os.environ.update(RANK=str(self.member), WORLD_SIZE=str(self.size))


def launch_store() -> Store:
    """Return a new client of the key-value store that the launch group was formed over."""
    store: Any = c10d._get_default_store()
    own: Store = store.clone()
    return own
