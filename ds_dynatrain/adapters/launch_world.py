"""The group that processes stand in before there is a world of ours, and while they are idle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as td
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters import parallel_state
from ds_dynatrain.adapters.communicators import Endpoint, end, make_communicator
from ds_dynatrain.adapters.device import is_accelerated
from ds_dynatrain.adapters.process_groups import make_fake_group, make_group, register, tear_down, unregister
from ds_dynatrain.adapters.watched import GroupStatus, ManagedProcessGroup


@dataclass(frozen=True)
class LaunchWorld:
    """The group that the launcher's processes formed; idle members stand in it. store, status: of one of `formed`."""

    group: Any
    member: int
    size: int
    store: Store | None = None
    status: GroupStatus | None = None

    @staticmethod
    def current() -> LaunchWorld:
        """The present default group, before any world of ours is installed."""
        return LaunchWorld(c10d._get_default_group(), td.get_rank(), td.get_world_size())

    @staticmethod
    def formed(store: Store, name: str, member: int, size: int, seconds: float, status: GroupStatus) -> LaunchWorld:
        """A group of `make_group`, watched, and known to `torch.distributed` from here on."""
        is_apart = size == 1 and is_accelerated()  # as in a world: one that needs nothing to serve both devices
        made = make_fake_group(name, 0, 1) if is_apart else make_group(store, name, member, size, seconds)
        group, store = (made[0] if is_apart else ManagedProcessGroup(made[0], status)), made[1]
        register(group, store, range(size))
        return LaunchWorld(group, member, size, store, status)

    def connect(self, seconds: float, stop: Callable[[], None]) -> None:
        """Let a group of `formed` serve the accelerator's device, too; all that stand in it call it, for what asks for
        that before there is a world. Nothing where there is no accelerator, and the second time.

        seconds, stop: see `make_communicator`, which also says what it raises.
        """
        is_served = self.size == 1 or not is_accelerated() or self.group.bound_device_id is not None
        if self.store is None or self.status is None or is_served:
            return
        place = Endpoint(str(self.group.group_name), range(self.size), self.member, self.store)
        found = make_communicator(place, seconds, stop)
        self.status.gate.take_in(found)
        found.serve(self.group)
        unregister(self.group)  # torch notes by what a group communicates
        register(self.group, self.store, range(self.size))

    def retire(self) -> threading.Thread:
        """Take down a group of `formed`, in which nobody stands any more; all its processes do. See `drop`."""
        unregister(self.group)
        if self.status is None:
            return tear_down([self.group])
        gone = [*self.status.gate.communicators]
        return tear_down([self.group], partial(end, gone, is_broken=self.status.is_broken))

    def install(self) -> None:
        """Speak of the launch group again: on a member that trains in no world."""
        c10d._update_default_pg(self.group)
        parallel_state.forget()
        os.environ.update(RANK=str(self.member), WORLD_SIZE=str(self.size))


def launch_store() -> Store:
    """A client of its own of the key-value store that the launch group was formed over."""
    store: Any = c10d._get_default_store()
    own: Store = store.clone()
    return own
