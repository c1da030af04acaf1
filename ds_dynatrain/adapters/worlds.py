"""Process groups of a world: built beside a running one, put in place of it, and taken away again.

`torch.distributed` and DeepSpeed both keep "the" world in private fields. Building happens in any thread and touches
none of them; `install` and `drop` do, and belong on the main thread between two steps.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td
from deepspeed.constants import default_pg_timeout
from deepspeed.utils import groups
from torch._C._distributed_c10d import PrefixStore, Store, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

GROUP_COUNT = 1000
"""Number from which later `new_group` calls are named: equal on members that were in different worlds before."""


@dataclass
class World:
    """The process groups of one generation, as seen by one of its members.

    `default` is what `torch.distributed` calls WORLD, `data` the clone of it that DeepSpeed reduces over, `transfer`
    spans the members of this and of the previous world during a switch (it may be `data` itself).
    """

    generation: int
    members: tuple[int, ...]
    rank: int | None
    default: td.ProcessGroup | None = None
    data: td.ProcessGroup | None = None
    transfer: td.ProcessGroup | None = None
    transfer_members: tuple[int, ...] = ()
    stores: dict[str, Store] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The prefix of this world's groups."""
        return f"dynatrain_{self.generation}"

    def retire_transfer(self) -> threading.Thread:
        """Take down a group that was made for the moves alone; see `drop`."""
        retired = [self.transfer] if "transfer" in self.stores and self.transfer is not None else []
        self.stores.pop("transfer", None)
        self.transfer, self.transfer_members = None, ()
        return _bury(retired)


def make_group(store: Store, name: str, rank: int, size: int, seconds: float) -> tuple[td.ProcessGroup, Store]:
    """A gloo group over `store`, unknown to `torch.distributed` so far; blocks until all `size` ranks are here.

    seconds: how long it waits for them. Collectives wait as long as in any DeepSpeed job: a member may be kept from
    them by an evaluation, or by waiting for another member's wish.

    Recipe: what `init_process_group` does for one backend, without its global state, so that it can run in a thread.
    """
    prefix = PrefixStore(f"{name}/", store)
    group = td.ProcessGroup(prefix, rank, size)
    gloo = td.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    timeout = datetime.timedelta(seconds=seconds)
    backend = td.ProcessGroupGloo(PrefixStore("cpu/", prefix), rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    backend._set_default_timeout(default_pg_timeout)
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_group_name(GroupName(name))
    return group, prefix


def build_world(
    store: Store,
    generation: int,
    member: int,
    members: Sequence[int],
    previous: Sequence[int],
    seconds: float,
) -> World:
    """The groups of generation `generation` for `member`, which is in `members`, in `previous`, or in both.

    Blocks until every member of both has called it (`seconds` at most each); store keys carry the generation and are
    never used again.
    """
    union = tuple(sorted({*members, *previous}))
    world = World(generation, tuple(members), members.index(member) if member in members else None)
    if world.rank is not None:
        for kind in ("default", "data"):
            group, prefix = make_group(store, f"{world.name}_{kind}", world.rank, len(members), seconds)
            setattr(world, kind, group)
            world.stores[kind] = prefix
    if set(union) == set(members):
        world.transfer, world.transfer_members = world.data, tuple(members)
    else:
        name = f"{world.name}_transfer"
        world.transfer, world.stores["transfer"] = make_group(store, name, union.index(member), len(union), seconds)
        world.transfer_members = union
    return world


def stand_in_world(rank: int, size: int) -> World:
    """A world without peers (torch's `fake` backend), for building an engine on a member that does not train yet."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = World(0, tuple(range(size)), rank)
    for kind in ("default", "data"):
        store = FakeStore()
        group = td.ProcessGroup(store, rank, size)
        backend = FakeProcessGroup._create_internal(rank, size)
        custom = td.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(custom)
        group._register_backend(torch.device("cpu"), custom, backend)
        group._set_group_name(GroupName(f"dynatrain_fake_{kind}"))
        setattr(world, kind, group)
        world.stores[kind] = store
    return world


def install(world: World) -> None:
    """Make `world` the one that `torch.distributed`, DeepSpeed and the environment variables speak of."""
    if world.rank is None or world.default is None or world.data is None:
        raise RuntimeError(f"generation {world.generation} cannot be installed: this member holds no rank in it")
    c10d._update_default_pg(world.default)
    for kind in ("default", "data"):
        _register(getattr(world, kind), world, kind)
    c10d._world.group_count = max(c10d._world.group_count, GROUP_COUNT)
    groups._WORLD_GROUP = world.data
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(len(world.members)))


def is_ours_installed() -> bool:
    """Whether `torch.distributed` speaks of a world of ours at present."""
    return str(c10d._get_default_group().group_name).startswith("dynatrain_")


def reinstall(world: World) -> None:
    """Go back to a world that was installed before and not dropped."""
    if world.rank is None:
        raise RuntimeError(f"generation {world.generation} cannot be reinstalled: this member holds no rank in it")
    c10d._update_default_pg(world.default)
    groups._WORLD_GROUP = world.data
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(len(world.members)))


def _register(group: td.ProcessGroup, world: World, kind: str) -> None:
    if group in c10d._world.pg_map:
        return
    backend = "fake" if group.name() == "custom" else "gloo"
    mapping = {rank: rank for rank in range(len(world.members))}
    c10d._register_pg_in_world(
        group, backend, world.stores[kind], group.group_name, f"cpu:{backend}", rank_mapping=mapping
    )


def drop(world: World) -> threading.Thread:
    """Forget and shut down every group of `world`; harmless for groups that were never installed.

    Gloo takes 20 to 40 ms to take a group down, longer if a peer is gone: that happens in the thread that is returned.
    Join it before the process ends.
    """
    groups_of: list[td.ProcessGroup] = []
    for kind in ("default", "data", "transfer"):
        group = getattr(world, kind)
        setattr(world, kind, None)
        if group is None or (kind == "transfer" and "transfer" not in world.stores):
            continue
        _unregister(group)
        if groups._WORLD_GROUP is group:
            groups._WORLD_GROUP = None
        groups_of.append(group)
    world.stores.clear()
    return _bury(groups_of)


def _bury(groups_of: list[td.ProcessGroup]) -> threading.Thread:
    thread = threading.Thread(target=groups_of.clear, name="dynatrain-bury", daemon=True)
    thread.start()
    return thread


def _unregister(group: td.ProcessGroup) -> None:
    known = group in c10d._world.pg_map
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks, c10d._world.pg_to_tag):
        table.pop(group, None)
    c10d._world.pg_backend_config.pop(group, None)
    for tag, tagged in list(c10d._world.tags_to_pg.items()):
        c10d._world.tags_to_pg[tag] = [other for other in tagged if other is not group]
        if not c10d._world.tags_to_pg[tag]:
            del c10d._world.tags_to_pg[tag]
    if known:
        _unregister_process_group(group.group_name)


@dataclass(frozen=True)
class LaunchWorld:
    """The group that the launcher's processes formed; idle members stand in it."""

    group: Any
    member: int
    size: int

    @staticmethod
    def current() -> LaunchWorld:
        """The present default group, before any world of ours is installed."""
        return LaunchWorld(c10d._get_default_group(), td.get_rank(), td.get_world_size())

    def install(self) -> None:
        """Speak of the launch group again: on a member that trains in no world."""
        c10d._update_default_pg(self.group)
        groups._WORLD_GROUP = None
        os.environ.update(RANK=str(self.member), WORLD_SIZE=str(self.size))


def launch_store() -> Store:
    """A client of its own of the key-value store that the launch group was formed over."""
    store: Any = c10d._get_default_store()
    own: Store = store.clone()
    return own


@contextmanager
def installed(world: World, launch: LaunchWorld) -> Iterator[None]:
    """`world` inside the block, the launch group after it; `world` is dropped."""
    install(world)
    try:
        yield
    finally:
        launch.install()
        drop(world).join()
